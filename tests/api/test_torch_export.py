"""Export of rewritten models, and rewriting what was exported or traced before."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.api.export_program import capture, export_with_plan
from amprewrite.runtime.compiler.capture_check import relative_error
from amprewrite.tables.formats import BF16, FORMATS
from amprewrite.tables.vocabulary import Colour

AUTO = torch.export.Dim.AUTO
MATMULS = {"addmm", "mm", "bmm", "convolution", "linear", "_scaled_dot_product_flash_attention_for_cpu"}


class Dtypes(TorchDispatchMode):
    """Dtypes in which matmuls and convolutions really run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket.__name__ in MATMULS:
            self.seen.add((result[0] if isinstance(result, tuple) else result).dtype)
        return result


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def mlp() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)), (torch.randn(6, 8),), {}


def cnn() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)
    )
    model(torch.randn(16, 3, 8, 8))  # running statistics of their own
    return model.eval(), (torch.randn(6, 3, 8, 8),), {}


def bert() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    ids = torch.randint(0, 99, (6, 8))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return transformers.BertForSequenceClassification(config).eval(), (), {"input_ids": ids, "attention_mask": mask}


def first(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.logits


def more_rows(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([value, value[:3]])


@torch.no_grad()
@pytest.mark.parametrize("make", [mlp, cnn, bert], ids=lambda make: make.__name__)
@pytest.mark.long
def test_export_gives_what_the_rewritten_model_gives(make, tmp_path):
    model, args, kwargs = make()
    amp = amprewrite.rewrite(model, dtype="bf16")
    shapes = tuple({0: AUTO} for _ in args) or {name: {0: AUTO} for name in kwargs}
    exported = amp.export_program(args, kwargs, dynamic_shapes=shapes)

    assert set(exported.state_dict) == set(model.state_dict())
    with Dtypes() as dtypes:
        got = first(exported.module()(*args, **kwargs))
    assert dtypes.seen == {torch.bfloat16}
    assert got.dtype == torch.float32
    assert relative_error([got], [first(amp(*args, **kwargs))]) <= BF16.eps
    assert 0 < relative_error([got], [first(model(*args, **kwargs))]) < 0.03

    torch.export.save(exported, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    assert torch.equal(first(loaded(*args, **kwargs)), got)
    more = tuple(map(more_rows, args)), {name: more_rows(value) for name, value in kwargs.items()}
    assert first(loaded(*more[0], **more[1])).shape[0] == 9


def test_checks_recorded_for_fp32_are_gone():
    model, args, kwargs = bert()
    exported = amprewrite.rewrite(model, dtype="bf16").export_program(args, kwargs)
    for module in exported.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            assert not [n for n in module.graph.nodes if n.target is torch.ops.aten._assert_tensor_metadata.default]


@torch.no_grad()
def test_the_plan_of_the_exported_graph():
    model, args, _ = mlp()
    exported, plan = export_with_plan(amprewrite.rewrite(model, dtype="bf16"), args)
    assert {node.op: node.colour for node in plan.nodes if node.role == "op"}["linear"] is Colour.LOW
    assert plan.low == "bf16" and len(plan.regions) == 1
    copies = [n for n in exported.graph.nodes if n.target is torch.ops.aten.to.dtype]
    assert len(copies) == len(plan.casts)


@torch.no_grad()
def test_an_export_follows_the_plan_that_the_model_follows():
    """torch.export lists inputs, weights and unread buffers, and operands of a batch norm, in an order of its own."""
    model, args, _ = cnn()
    plan = amprewrite.plan(model, args, dtype="bf16").edit({"linear": "high"})
    amp = amprewrite.rewrite(model, plan=plan)
    exported, followed = export_with_plan(amp, args)
    assert torch.equal(exported.module()(*args), amp(*args))
    assert {node.name: node.colour for node in followed.nodes if node.role == "op"}["linear"] is Colour.HIGH


def test_gradients_flow_through_an_exported_program():
    model, args, _ = mlp()
    module = amprewrite.rewrite(model, dtype="bf16").export_program(args).module()
    module(*args).square().sum().backward()
    model(*args).square().sum().backward()
    exact = dict(model.named_parameters())
    for name, parameter in module.named_parameters():
        assert relative_error([parameter.grad], [exact[name].grad]) < 0.05


class Rotary(nn.Module):
    """Angles under no_grad, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("frequency", torch.arange(1, 9) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            angle = torch.arange(x.shape[1])[:, None] * self.frequency
            cos = angle.float().cos().to(x.dtype)
        return self.out(self.q(x) * cos)


def test_no_grad_regions_are_opened_and_closed_again():
    model, x = Rotary(), torch.randn(2, 5, 8)
    assert not [n for n in capture(model, (x,)).graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)]
    exported = amprewrite.rewrite(model, dtype="bf16").export_program((x,))
    got = exported.module()(x)
    assert got.requires_grad and relative_error([got], [model(x)]) < 0.03
    assert [n for n in exported.graph.nodes if n.target is torch.ops.higher_order.wrap_with_set_grad_enabled]


class InnerAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            h = self.b(h) * 2
        return self.a(h)


@torch.no_grad()
def test_the_models_own_autocast_regions_stay_as_they_were():
    model, x = InnerAutocast(), torch.randn(3, 8)
    module = amprewrite.rewrite(model, dtype="bf16").export_program((x,)).module()
    with Dtypes() as dtypes:
        got = module(x)
    assert dtypes.seen == {torch.bfloat16, torch.float32}
    assert relative_error([got], [model(x)]) < 0.03


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x)
        return self.net(h * self.norm(h).exp())


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_program_can_be_unflattened(dtype: str):
    x = torch.randn(3, 8)
    program = amprewrite.rewrite(Interrupted(), dtype=dtype).export_program((x,))
    assert torch.equal(torch.export.unflatten(program)(x), program.module()(x))


class OwnHalf(nn.Module):
    def __init__(self, product: bool) -> None:
        super().__init__()
        self.a, self.b, self.product = nn.Linear(8, 8), nn.Linear(8, 8), product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.product:
            h = nn.functional.linear(x.bfloat16(), self.a.weight.bfloat16())
        else:
            with torch.autocast("cpu", torch.bfloat16):
                h = self.a(x)
        return self.b(h.float())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_the_model_computes_in_half_precision_itself_is_exported_as_it_runs(dtype: str, tmp_path):
    model, x = OwnHalf(product=True).eval(), torch.randn(3, 8)
    program = amprewrite.rewrite(model, dtype=dtype).export_program((x,))
    assert torch.equal(program.module()(x), amprewrite.rewrite(model, dtype=dtype)(x))
    again = amprewrite.rewrite(program, dtype=dtype).export_program((x,))  # a program that is mixed already
    assert torch.equal(again.module()(x), program.module()(x))


def test_a_model_with_an_autocast_region_for_halves_is_exported_to_onnx(tmp_path):
    amp = amprewrite.rewrite(OwnHalf(product=False).eval(), dtype="bf16")
    assert amp.export_onnx(tmp_path / "m.onnx", (torch.randn(3, 8),)).report.valid


def test_unused_and_tied_parameters_keep_their_names():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head, self.unused = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False), nn.Linear(2, 2)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    model = Tied()
    exported = amprewrite.rewrite(model, dtype="bf16").export_program((torch.arange(6)[None],))
    assert set(exported.state_dict) == set(model.state_dict())


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x.sum() > 0 else self.a(-x)


def test_what_export_cannot_capture_is_a_clear_error():
    amp = amprewrite.rewrite(DataDependent(), dtype="bf16")
    with pytest.raises(amprewrite.CaptureError, match=r"torch.export cannot capture DataDependent whole: .*region by region"):
        amp.export_program((torch.ones(2, 4),))


class GradInside(nn.Module):
    """torch.export lifts the value that torch.func computes here into constants without values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.func.grad(lambda t: (t * t).sum())(x)
        y.copy_(x * 2)
        return y


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_export_with_constants_that_have_no_values_is_refused(dtype):
    amp, hooks = amprewrite.rewrite(GradInside(), dtype=dtype), torch.nn.modules.module._global_buffer_registration_hooks
    before = dict(hooks)
    why = r"lifted_tensor_0, without values" if torch.__version__ >= "2.12" else "Expected FakeTensor"  # 2.11 itself refuses
    with pytest.raises(amprewrite.CaptureError, match=rf"cannot capture GradInside whole: .*{why}"):
        amp.export_program((torch.ones(2, 4),))
    hooks.clear(), hooks.update(before)  # before torch 2.13 a failed export leaves its hook on all modules


def test_export_under_autocast_is_refused():
    model, args, _ = mlp()
    amp = amprewrite.rewrite(model, dtype="bf16")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(amprewrite.CaptureError, match="autocast"):
        amp.export_program(args)


def test_the_original_and_the_rewritten_model_are_left_alone():
    model, args, _ = cnn()
    amp = amprewrite.rewrite(model, dtype="bf16")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    amp.export_program(args)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert type(amp.export_program(args)) is torch.export.ExportedProgram
    with pytest.raises(amprewrite.PlanError):
        print(amp.plan)  # exporting is no call


# -- the other way: what was captured before is rewritten -----------------------------------
@torch.no_grad()
@pytest.mark.parametrize("make", [mlp, cnn, bert], ids=lambda make: make.__name__)
def test_an_exported_program_is_rewritten(make):
    model, args, kwargs = make()
    shapes = tuple({0: AUTO} for _ in args) or {name: {0: AUTO} for name in kwargs}
    exported = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    amp = amprewrite.rewrite(exported, example_inputs=args, example_kwargs=kwargs, dtype="bf16")
    with Dtypes() as dtypes:
        got = first(amp(*args, **kwargs))
    assert dtypes.seen == {torch.bfloat16} and got.dtype == torch.float32
    assert 0 < relative_error([got], [first(model(*args, **kwargs))]) < 0.03
    assert set(amp.state_dict()) >= set(model.state_dict())
    more = tuple(map(more_rows, args)), {name: more_rows(value) for name, value in kwargs.items()}
    assert first(amp(*more[0], **more[1])).shape[0] == 9


@torch.no_grad()
@pytest.mark.parametrize("make", [mlp, cnn], ids=lambda make: make.__name__)
def test_a_graph_module_is_rewritten(make):
    model, args, _ = make()
    traced = torch.fx.symbolic_trace(model)
    amp = amprewrite.rewrite(traced, dtype="bf16")
    assert isinstance(amp, torch.fx.GraphModule) and list(amp.state_dict()) == list(model.state_dict())
    assert 0 < relative_error([amp(*args)], [model(*args)]) < 0.03
    assert amp.plan.casts
    assert relative_error([traced(*args)], [model(*args)]) == 0


def test_a_graph_module_trains():
    model, args, _ = mlp()
    amp = amprewrite.rewrite(torch.fx.symbolic_trace(model), dtype="bf16")
    F.mse_loss(amp(*args), torch.zeros(6, 4)).backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@torch.no_grad()
def test_what_was_exported_from_a_rewrite_loads_without_amprewrite():
    model, args, _ = mlp()
    buffer = io.BytesIO()
    torch.export.save(amprewrite.rewrite(model, dtype="bf16").export_program(args), buffer)
    assert b"amprewrite" not in b"".join(str(n.target).encode() for n in torch.export.load(_rewound(buffer)).graph.nodes)


def _rewound(buffer: io.BytesIO) -> io.BytesIO:
    buffer.seek(0)
    return buffer


def test_no_warnings():
    model, args, _ = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error", amprewrite.AmpRewriteWarning)
        amprewrite.rewrite(model, dtype="bf16").export_program(args)


class GradBlock(nn.Module):
    """One value is read before and within a block of another grad mode, and alone enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.a(x)
        y.rot90()
        with torch.enable_grad():
            out: torch.Tensor = self.b(y)
        return out


def test_a_value_of_several_grad_modes_is_exported() -> None:
    """torch.export forgets some readers of such a value."""
    amp, x = amprewrite.rewrite(GradBlock(), dtype="bf16", overrides={"module:a": "fp32"}), torch.randn(3, 4)
    with torch.no_grad():
        exported = amp.export_program((x,))
        for module in exported.graph_module.modules():
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                assert all(node in source.users for source in node.all_input_nodes)
        torch.testing.assert_close(exported.module()(x), amp(x))


class Beyond(nn.Module):
    """Values beyond fp16 on the way to a product: of inputs, or of weights alone. `how` names what is done."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.5)
        with torch.no_grad():
            self.second.weight[0, 0] = 1e6 if how in ("view", "scaled", "added") else 0.5

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.norm(self.first(x * scale) + shift)
        if self.how == "view":
            return x @ self.second.weight.t()
        if self.how == "scaled":
            return F.linear(x, self.second.weight * 0.5)
        if self.how == "added":
            return F.linear(x, torch.stack([self.second.weight, self.second.weight]).sum(0))
        return self.second(self.drop(x * 1e6)) * 1e-6


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("how", ["view", "scaled", "added", "grows"])
def test_what_overflows_on_the_inputs_of_an_export_stays_fp32_there(how: str, training: bool) -> None:
    """No call came before. Running statistics and random numbers are as if nothing had been run."""
    model, x, shift = Beyond(how).train(training), torch.randn(8, 16), torch.randn(8, 16)
    given = {"scale": 2.0, "shift": shift}  # not in the order of the signature
    amp = amprewrite.rewrite(model, dtype="fp16")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    program, plan = export_with_plan(amp, (x,), given)
    drawn = torch.rand(4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(4))
    torch.manual_seed(5)
    got = program.module()(x, **given)
    torch.manual_seed(5)
    assert relative_error([model(x, **given)], [got]) < 2e-3
    low = {node.name for region in plan.regions for node in region.nodes if node.colour is Colour.LOW and node.role == "op"}
    assert any(name.startswith("linear") for name in low), "the first product is as it was"


def test_an_export_knows_what_a_first_call_learnt_of_small_values() -> None:
    """An overflow had the called graph decided by ranges: what fp16 flushes stays fp32 there, and in a program of other names as well."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            small = checkpoint(lambda t: F.linear(t * 2.0**-30, self.first.weight) * 2.0**30, x, use_reentrant=False)
            return torch.nan_to_num(F.linear(small * 2.0**17, self.second.weight)) * 2.0**-17

    model, x = Wide(), torch.randn(4, 8)
    amp = amprewrite.rewrite(model, dtype="fp16", loss_scale=None)
    assert relative_error([model(x)], [amp(x)]) < 2e-3
    assert relative_error([model(x)], [amp.export_program((x,)).module()(x)]) < 2e-3


def test_an_export_that_overflows_whatever_is_kept_high_says_so() -> None:
    """What an override asks for is done, and a decision made anew cannot mend it."""
    model = nn.Sequential(nn.Linear(16, 16))
    nn.init.constant_(model[0].weight, 6e4)
    amp = amprewrite.rewrite(model, dtype="fp16", overrides={"module:0": "low"})
    with pytest.warns(amprewrite.AmpRewriteWarning, match=r"NaN or infinities in fp16 where fp32 gives none"):
        amp.export_program((torch.ones(2, 16),))


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y if shift is None else y + shift


@pytest.mark.parametrize(("args", "kwargs"), [((torch.ones(4, 16), None), {}), ((torch.ones(4, 16),), {"shift": None})])
def test_an_argument_may_be_none(args, kwargs):
    model = Optional()
    exported = amprewrite.rewrite(model, dtype="bf16").export_program(args, kwargs)
    assert relative_error([model(*args, **kwargs)], [exported.module()(*args, **kwargs)]) < 1e-2


class Several(Optional):
    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum(map(self.layer, parts))  # type: ignore[assignment]
        return total


@pytest.mark.parametrize("shapes", [({0: AUTO}, {0: AUTO}), {"parts": ({0: AUTO}, {0: AUTO})}], ids=["in order", "by name"])
def test_arguments_that_are_gathered_may_have_dynamic_shapes(shapes):
    model, args = Several(), (torch.ones(4, 16), torch.ones(4, 16))
    shapes = (shapes,) if isinstance(shapes, tuple) else shapes
    exported = amprewrite.rewrite(model, dtype="bf16").export_program(args, dynamic_shapes=shapes)
    others = torch.ones(7, 16), torch.ones(7, 16)
    assert relative_error([model(*others)], [exported.module()(*others)]) < 1e-2


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_model_without_values_is_exported_low(dtype):
    """The meta device has no autocast to switch on around the export."""
    model, x = nn.Linear(16, 8, device="meta"), torch.empty(4, 16, device="meta")
    exported = amprewrite.rewrite(model, dtype=dtype).export_program((x,))
    with Dtypes() as ran:
        assert exported.module()(x).device.type == "meta"
    assert ran.seen == {FORMATS[dtype].dtype}
