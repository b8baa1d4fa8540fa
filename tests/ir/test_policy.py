"""Bad options get an error of ours that names the thing and the remedy; good ones mean what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.ir.policies.policy import Policy, parse_overrides
from amprewrite.tables.errors import AmpRewriteError, CaptureError, OpListError, PolicyError
from amprewrite.tables.formats import BF16, FP16, FP32, parse_format
from amprewrite.tables.ops.op_lists import OpLists, op_lists


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.softmax(self.encoder(x), -1))


X = torch.randn(3, 4)


def rewrite(model: Any = None, **options: Any) -> Any:
    return amprewrite.rewrite(Net() if model is None else model, **{"dtype": "bf16", **options})


# options ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, says",
    [
        pytest.param(
            {"dtype": "fp4"}, PolicyError, "dtype='fp4' .* use one of fp32, fp16, bf16, or their torch dtypes", id="no format"
        ),
        pytest.param({"dtype": "fp8"}, PolicyError, "use dtype='bf16', products='fp8'", id="a format of products alone"),
        pytest.param({"dtype": "bfloat"}, PolicyError, "dtype='bfloat' is not a format", id="a format misspelled"),
        pytest.param({"dtype": torch.float64}, PolicyError, "dtype=torch.float64 is not a format", id="another float"),
        pytest.param({"dtype": torch.int8}, PolicyError, "dtype=torch.int8", id="an integer"),
        pytest.param({"dtype": 16}, PolicyError, "dtype=16", id="a number of bits"),
        pytest.param(
            {"lists": "tensorflow"}, OpListError, "'tensorflow' is no preset; use one of default, tf, autocast", id="no preset"
        ),
        pytest.param({"lists": None}, OpListError, "lists=None is no preset", id="no lists"),
        pytest.param(
            {"backend": "inductr"}, PolicyError, "backend='inductr' is no torch.compile backend; there are eager", id="no backend"
        ),
        pytest.param({"backend": "amprewrite"}, PolicyError, "would rewrite a rewritten graph; name the compiler", id="ourselves"),
        pytest.param(
            {"plan": "{}"}, PolicyError, r"plan= takes a CastPlan \(CastPlan.from_json reads one\), not str", id="a plan as text"
        ),
        pytest.param(
            {"optimizer": "sgd"},
            PolicyError,
            "optimizer= takes a torch.optim.Optimizer or several, not str",
            id="an optimizer's name",
        ),
        pytest.param({"optimizer": [nn.Linear(1, 1)]}, PolicyError, "not Linear", id="a list of something else"),
        pytest.param(
            {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)},
            PolicyError,
            r"SGD\b.* owns none of the model's parameters",
            id="another model's optimizer",
        ),
        pytest.param({"loss_scale": "often"}, PolicyError, "loss_scale=", id="no loss scale"),
        pytest.param({"pad": "perhaps"}, PolicyError, "pad = .perhaps. is not understood", id="no such padding"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[AmpRewriteError], says: str) -> None:
    with pytest.raises(error, match=says):
        rewrite(**options)


@pytest.mark.parametrize(
    "overrides, says",
    [
        pytest.param(
            {"sofmax": "deny"}, r"overrides\['sofmax'\]: there is no op 'sofmax'; did you mean softmax", id="an op misspelled"
        ),
        pytest.param({"encoder.0": "fp32"}, r"there is no op 'encoder\.0'; .*\? \(for a module write 'module:PATH'\)", id="a bare module"),
        pytest.param({"@": "deny"}, "there is no op '@'; `amprewrite.tables.ops.op_lists.OPS` lists all ops", id="nothing like an op"),
        pytest.param(
            {"module:encodr": "fp32"}, "matches no module of the model; did you mean module:encoder", id="a module misspelled"
        ),
        pytest.param({"module:encoder.0": "fp32"}, r"overrides\['module:encoder.0'\] matches no module", id="a part it has not"),
        pytest.param(
            {"layer:encoder": "fp32"}, "'layer' is no scope; write 'OP', 'module:PATTERN' or 'node:PATTERN'", id="no scope"
        ),
        pytest.param({"softmax": "fp8"}, r"\['softmax'\] = 'fp8' is not understood; use one of allow, bf16, clear", id="no word"),
        pytest.param({"softmax": None}, "= None is not understood", id="no value"),
        pytest.param(
            {"module:encoder": "deny"}, "= 'deny' is not understood; use one of fp32, high, low", id="a list for a module"
        ),
        pytest.param({"node:linear": "infer"}, "= 'infer' is not understood; use one of fp32, high, low", id="a list for a node"),
        pytest.param({"softmax": "fp16"}, "asks for fp16, but this rewrite's low format is bf16", id="the other low format"),
        pytest.param(
            {"linear": "deny", "mkldnn_linear": "low"},
            r"overrides\['mkldnn_linear'\] says allow, overrides\['linear'\] says deny: keep one",
            id="one op under two names, told two things",
        ),
    ],
)
def test_bad_overrides(overrides: dict[str, str], says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        rewrite(overrides=overrides)


def test_a_node_pattern_that_matches_nothing_is_found_at_capture() -> None:
    with pytest.raises(PolicyError, match=r"overrides\['node:liner_1'\] matches no node .*did you mean node:linear_1"):
        rewrite(overrides={"node:liner_1": "fp32"}, example_inputs=(X,))


def test_contradictions_are_found_at_capture_and_name_both_sources() -> None:
    with pytest.raises(
        PolicyError, match=r"\['node:linear'\] says low and overrides\['node:lin\*'\] says high for node linear in module encoder"
    ):
        rewrite(overrides={"node:linear": "low", "node:lin*": "high"}, example_inputs=(X,))


def test_example_inputs_are_a_tuple() -> None:
    with pytest.raises(PolicyError, match="example_inputs= takes the tuple of positional arguments, not Tensor"):
        rewrite(example_inputs=X)


# models -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, error, says",
    [
        pytest.param(
            torch.relu,
            PolicyError,
            "takes an nn.Module or an ExportedProgram, not .*; wrap functions in a module",
            id="a function",
        ),
        pytest.param(Net, PolicyError, "not type", id="a class"),
        pytest.param({"net": 1}, PolicyError, "not dict", id="a dict"),
        pytest.param(
            Net().half(),
            PolicyError,
            r"such as encoder.weight \(.* in all\) are fp16 already.*upcast=True.*model.float\(\)",
            id="a half model",
        ),
        pytest.param(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()),
            PolicyError,
            "such as 1.weight .* are bf16 already",
            id="a half part",
        ),
        pytest.param(
            torch.compile(Net()),
            CaptureError,
            "went through torch.compile; rewrite the original with backend=",
            id="a compiled model",
        ),
    ],
)
def test_bad_models(model: Any, error: type[AmpRewriteError], says: str) -> None:
    with pytest.raises(error, match=says):
        rewrite(model)


def test_ambient_autocast_is_refused_at_rewrite_and_at_the_call() -> None:
    amp = rewrite()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match=r"inside torch.autocast.*call it outside"):
        rewrite()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match=r"inside torch.autocast.*call it outside"):
        amp(X)
    assert amp(X).dtype is torch.float32  # and it is none the worse for it


def test_a_rewritten_model_is_rewritten_afresh() -> None:
    amp = rewrite(overrides={"linear": "deny"}, example_inputs=(X,))
    again = rewrite(amp, dtype="fp16", loss_scale=None, example_inputs=(X,))
    assert (amp.plan.low, again.plan.low) == ("bf16", "fp16")
    assert again.plan.explain("linear").startswith("linear in encoder runs low (fp16)")
    assert again.encoder.weight is amp.encoder.weight


def test_a_refused_model_is_left_as_it_was() -> None:
    model = Net()
    before, want = dict(vars(model)), model(X)
    for options in (
        {"dtype": "fp8"},
        {"overrides": {"sofmax": "deny"}},
        {"overrides": {"node:none": "low"}, "example_inputs": (X,)},
    ):
        with pytest.raises(AmpRewriteError):
            rewrite(model, **options)
    assert vars(model) == before
    assert type(model) is Net
    torch.testing.assert_close(model(X), want, rtol=0, atol=0)


def test_plan_checks_as_rewrite_does() -> None:
    with pytest.raises(PolicyError, match="there is no op 'sofmax'"):
        amprewrite.plan(Net(), (X,), dtype="bf16", overrides={"sofmax": "deny"})


@pytest.mark.parametrize("error", ["OpListError", "PolicyError", "CaptureError", "PlanError", "PassError", "EmitError"])
def test_every_error_is_an_amprewrite_error(error: str) -> None:
    assert issubclass(getattr(amprewrite, error), amprewrite.AmpRewriteError)


# what good options mean -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling, fmt",
    [("bf16", BF16), ("bfloat16", BF16), ("torch.bfloat16", BF16), (torch.bfloat16, BF16), ("FP16", FP16), ("half", FP16),
     (torch.float16, FP16), ("float", FP32), (torch.float32, FP32), (BF16, BF16)],
)  # fmt: skip
def test_formats_have_many_spellings(spelling: Any, fmt: Any) -> None:
    assert parse_format(spelling) is fmt


def test_fp32_is_a_policy_and_other_formats_are_not() -> None:
    assert Policy(FP32).low is FP32
    with pytest.raises(PolicyError, match="odd cannot be the low format; use bf16 or fp16"):
        Policy(replace(BF16, name="odd", dtype=torch.float64))


@pytest.mark.parametrize(
    "key, path, means_it",
    [
        pytest.param("module:encoder", "encoder", True, id="itself"),
        pytest.param("module:encoder", "encoder.layer.0", True, id="what is inside"),
        pytest.param("module:encoder.layer", "encoder", False, id="not what is around"),
        pytest.param("module:encoder", "encoder2", False, id="not another with a longer name"),
        pytest.param("module:encoder.*", "encoder.layer", True, id="a pattern"),
        pytest.param("module:encoder.*", "encoder", False, id="not its root"),
        pytest.param("module:*.layer.?", "decoder.layer.3.out", True, id="a pattern for one of those around"),
        pytest.param("exp", "exp", False, id="an op entry means no module"),
    ],
)
def test_module_patterns(key: str, path: str, means_it: bool) -> None:
    (override,) = parse_overrides({key: "fp32"}, BF16)
    assert override.matches_module(path) is means_it


def asked(overrides: dict[str, str], name: str, module: str) -> str | None:
    found = Policy(BF16, overrides=parse_overrides(overrides, BF16)).asked_for(name, module)
    return found.word if found else None


@pytest.mark.parametrize(
    "overrides, word",
    [
        pytest.param({"softmax": "deny"}, None, id="op entries move lists, they ask for no node"),
        pytest.param({"module:a": "fp32"}, "high", id="a module"),
        pytest.param({"module:a": "fp32", "module:a.b": "low"}, "low", id="the longer module pattern wins"),
        pytest.param({"module:a.b": "low", "module:*": "fp32"}, "low", id="whatever their order"),
        pytest.param({"module:a.b": "low", "node:exp_1": "fp32"}, "high", id="a node beats a module"),
        pytest.param({"node:exp*": "low", "node:exp_?": "low"}, "low", id="two that agree"),
        pytest.param({"module:c": "low"}, None, id="another module"),
    ],
)
def test_the_nearest_override_wins(overrides: dict[str, str], word: str | None) -> None:
    assert asked(overrides, "exp_1", "a.b") == word


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"node:exp*": "low", "node:*_1": "high"}, id="two node patterns"),
        pytest.param({"module:a.b": "low", "module:a.?": "high"}, id="two module patterns of one length"),
    ],
)
def test_contradictions_name_both_sources_and_the_node(overrides: dict[str, str]) -> None:
    with pytest.raises(PolicyError, match=r"for node exp_1 in module a.b: make one of them narrower") as caught:
        asked(overrides, "exp_1", "a.b")
    assert all(repr(key) in str(caught.value) for key in overrides)


def test_fp32_and_low_move_an_op_to_another_list() -> None:
    lists = Policy(BF16, overrides=parse_overrides({"softmax": "fp32", "exp": "low", "relu": "infer"}, BF16)).op_lists(
        op_lists("default", BF16, "cpu")
    )
    assert [lists.kind(op).value for op in ("softmax", "exp", "relu")] == ["deny", "allow", "infer"]  # type: ignore[union-attr]


def test_an_op_on_two_lists_is_an_error_that_names_both() -> None:
    with pytest.raises(OpListError, match="'linear' stands on the allowlist and on the denylist of 'mine'; keep one"):
        OpLists.from_sets("mine", allow=["linear"], deny=["linear"])
    with pytest.raises(OpListError, match="there is no op named 'liner'; did you mean linear"):
        OpLists.from_sets("mine", allow=["liner"])
