"""A rewritten model is a drop-in: same class, same tensors, same keys; copies stay rewritten; the original is untouched."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from dataclasses import dataclass

import pytest
import torch
from runtime_help import MLP, data, low, matmul_dtypes, mlp, ran_low
from torch import nn

import amprewrite
from amprewrite import AmpRewriteWarning, CaptureError, PlanError, PolicyError
from amprewrite.api.module import Rewritten
from amprewrite.runtime.captured import graph_rewriter
from amprewrite.runtime.model.rewritten import RewrittenBase


class Tied(nn.Module):
    """Shared weights, a buffer, a norm, and a linear layer that occurs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU())
        self.again = self.body[0]
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.ones(8))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.again(self.body(x) + self.shift))


def test_same_class_tensors_and_keys():
    model = Tied()
    amp = low(model)
    assert isinstance(amp, Tied) and amp is not model and type(amp).__name__ == "Tied"
    assert {n: id(p) for n, p in amp.named_parameters()} == {n: id(p) for n, p in model.named_parameters()}
    assert {n: id(b) for n, b in amp.named_buffers()} == {n: id(b) for n, b in model.named_buffers()}
    assert list(amp.state_dict()) == list(model.state_dict())
    assert [n for n, _ in amp.named_modules()] == [n for n, _ in model.named_modules()]
    assert amp.head.weight is amp.embed.weight and amp.again is amp.body[0] and amp.again is not model.again
    assert repr(amp) == repr(model)


def test_original_is_untouched():
    model = Tied()
    ids = torch.arange(6)
    before = model.eval()(ids)
    attributes = {name: dict(m.__dict__) for name, m in model.named_modules()}
    amp = low(model)
    amp.train()
    amp.body.register_forward_hook(lambda *_: None)
    amp(ids)
    amp.eval()
    amp.extra = 3
    amp.body.append(nn.Identity())
    assert not model.training and not hasattr(model, "extra") and len(model.body) == 3
    assert not model.body._forward_hooks
    assert all(attributes[name].keys() == m.__dict__.keys() for name, m in model.named_modules())
    assert model.body[0]._compiled_call_impl is None
    model.load_state_dict(Tied().state_dict(), strict=False)  # shared tensors: both see it
    assert torch.equal(amp.embed.weight, model.embed.weight)
    assert before.dtype == model(ids).dtype == torch.float32


def test_tied_weights_get_one_gradient():
    torch.manual_seed(0)
    model, ids = Tied(), torch.arange(6)
    amp = low(model)
    amp(ids).square().mean().backward()
    got = {n: p.grad.clone() for n, p in amp.named_parameters()}
    model.zero_grad()
    model(ids).square().mean().backward()
    for name, p in model.named_parameters():
        assert got[name].dtype == torch.float32
        torch.testing.assert_close(got[name], p.grad, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("when", ["before", "after"])
def test_optimizer_made_before_or_after(when):
    model, x = mlp(), data()
    opt = torch.optim.SGD(model.parameters(), 0.1) if when == "before" else None
    amp = low(model, optimizer=opt) if opt else low(model)
    opt = opt or torch.optim.SGD(amp.parameters(), 0.1)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        loss = amp(x).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(model.first.weight, amp.first.weight)


def test_train_and_eval_switch_the_model_not_the_original():
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    amp, x = low(model), data()
    assert not torch.equal(amp(x), amp(x))
    amp.eval()
    assert torch.equal(amp(x), amp(x)) and model.training
    amp.train()
    assert not torch.equal(amp(x), amp(x))
    amp[1].eval()
    assert torch.equal(amp(x), amp(x))


def test_batch_norm_statistics_move_as_in_fp32():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    twin = copy.deepcopy(model)
    amp, x = low(model), data(32, 8)
    for _ in range(3):
        amp(x), twin(x)
    assert model[1].num_batches_tracked == 3 and model[1].running_mean.dtype == torch.float32
    torch.testing.assert_close(model[1].running_mean, twin[1].running_mean, rtol=0.05, atol=5e-3)
    torch.testing.assert_close(model[1].running_var, twin[1].running_var, rtol=0.05, atol=5e-3)


class Average(nn.Module):
    """An exponential moving average kept in a buffer, written in place, then read by a matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8, 8))

    def forward(self, x):
        y = self.fc(x)
        self.mean.mul_(0.5).add_(y.detach().t() @ y.detach(), alpha=0.5)
        return y @ self.mean


@pytest.mark.parametrize("grad", [True, False])
def test_buffer_written_in_place_then_read(grad):
    torch.manual_seed(0)
    model = Average().eval()
    twin = copy.deepcopy(model)
    amp, x = low(model), data(8, 8)
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            got, want = amp(x), twin(x)
            torch.testing.assert_close(got, want, rtol=0.1, atol=0.1)
    torch.testing.assert_close(model.mean, twin.mean, rtol=0.05, atol=0.05)
    assert model.mean.dtype == torch.float32


# -- structures ---------------------------------------------------------------------------
@dataclass
class Out:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    name: str = "out"


def test_structured_inputs_and_outputs():
    class Structured(MLP):
        def forward(self, batch: dict, *, scale=1.0, extra=None):
            y = super().forward(batch["x"]) * scale
            if extra is not None:
                y = y + extra[0][1]
            return Out(y, y.mean()), {"deep": [y, (y.sum(), None, 3, "text")]}

    model, x = Structured(), data()
    amp = low(model)
    for extra in (None, [(1, torch.ones(4))]):
        (got, tree), (want, other) = amp({"x": x}, scale=2.0, extra=extra), model({"x": x}, scale=2.0, extra=extra)
        assert type(got) is Out and got.name == "out" and got.loss.dtype == torch.float32
        assert ran_low(got.logits, want.logits)
        assert tree["deep"][1][1:] == other["deep"][1][1:] and tree["deep"][0].dtype == torch.float32


def test_other_dtypes_pass_through():
    class Mixed(MLP):
        def forward(self, x, ids, flag, wave, long, sparse):
            y = super().forward(x)
            return y, ids + 1, ~flag, wave * 2, long @ long.t(), (sparse @ y[:, :1]).relu(), torch.view_as_real(wave)

    model = Mixed()
    args = (
        data(), torch.arange(3), torch.tensor([True, False]), torch.randn(3, dtype=torch.complex64),
        torch.randn(3, 3, dtype=torch.float64), torch.eye(3).to_sparse(),
    )  # fmt: skip
    got, want = low(model)(*args), model(*args)
    assert [g.dtype for g in got] == [w.dtype for w in want]
    assert ran_low(got[0], want[0])
    for g, w in zip(got[1:5], want[1:5], strict=True):
        assert torch.equal(g, w)


def test_fp64_model_is_left_alone():
    model, x = mlp().double(), data().double()
    amp = low(model)
    with pytest.warns(amprewrite.AmpRewriteWarning, match="nothing is rewritten"):
        assert torch.equal(amp(x), model(x))


# -- shapes ------------------------------------------------------------------------------------
def test_other_batch_sizes_and_lengths_capture_few_graphs():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    amp = low(model)
    for batch in (2, 3, 5, 7, 1, 4):
        for length in (3, 4, 6, 9):
            x = data(batch, length, 8)
            assert ran_low(amp(x), model(x))
    assert len(amp.plans) <= 3


# -- copies ---------------------------------------------------------------------------------------
COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda amp: pickle.loads(pickle.dumps(amp)),
    "torch.save": lambda amp: _saved(amp),
}


def _saved(amp):
    buffer = io.BytesIO()
    torch.save(amp, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("called", [False, True])
def test_copies_stay_rewritten(how, called):
    model, x = mlp(), data()
    amp = low(model, overrides={"relu": "deny"})
    if called:
        amp(x)
    twin = COPIES[how](amp)
    assert isinstance(twin, MLP) and twin.first.weight is not amp.first.weight
    with pytest.raises(PlanError):
        str(twin.plan)
    assert torch.equal(twin(x), amp(x)) and ran_low(twin(x), model(x))
    assert matmul_dtypes(twin.first, x) == {torch.bfloat16}
    with torch.no_grad():
        twin.first.weight.zero_()
    assert amp.first.weight.any() and ran_low(amp(x), model(x))


def test_deepcopy_of_a_model_that_holds_a_rewritten_one():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = low(mlp())

        def forward(self, x):
            return self.inner(x) + 1

    holder, x = Holder(), data()
    twin = copy.deepcopy(holder)
    assert ran_low(twin(x), mlp()(x) + 1)
    assert twin.inner.first.weight is not holder.inner.first.weight


@pytest.mark.parametrize("inplace", [False, True])
def test_deepcopy_of_what_holds_a_model_and_modules_of_it_keeps_them_the_same(inplace):
    class Agent(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.first, self.net, self.last = net.body, net, net.head

    class Sampler:
        def __init__(self, net):
            self.net = net

    net = Tied()
    net.sampler = Sampler(net)
    agent = Agent(low(net, inplace=inplace))
    twin = copy.deepcopy(agent)
    assert twin.first is twin.net.body and twin.last is twin.net.head and twin.net.again is twin.net.body[0]
    assert twin.net.sampler is not net.sampler and (twin.net.sampler.net is twin.net or not inplace)
    twin.load_state_dict({name: each.clone() for name, each in twin.state_dict().items()}, assign=True)  # new buffers for each module
    x = torch.randn(64, 8) * 3 + 1
    twin.train().net.body(x)
    assert torch.equal(twin.eval().first(x), twin.net.body(x)) and matmul_dtypes(twin.first, x) == {torch.bfloat16}


@pytest.mark.parametrize("granularity", ["model", ["0"]])
def test_deepcopy_of_a_part_that_is_parametrized_runs_the_weights_of_the_copy(granularity):
    model = nn.Sequential(mlp(), nn.Linear(4, 4))
    nn.utils.parametrizations.weight_norm(model[0].first)
    amp, x = low(model, granularity=granularity), data()
    amp(x)
    for part in (amp[0], amp[0].first):
        twin = copy.deepcopy(part)
        with torch.no_grad():
            for each in twin.parameters():
                each.zero_()
        assert part(x).any() and not twin(x).nan_to_num().any()


class WithState(nn.Linear):
    """A linear layer that copies all its attributes but one, as classes with a cache or a lock do."""

    def __getstate__(self):
        return {**self.__dict__, "cache": None}


@pytest.mark.filterwarnings("ignore:Sequential has code that runs as it is written")  # an LSTM runs apart from compiled graphs
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("part", [lambda: nn.LSTM(8, 8), lambda: WithState(8, 8)], ids=["lstm", "own state"])
@pytest.mark.parametrize("again", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_part_whose_class_copies_itself_runs_the_weights_of_the_copy(part, again, backend):
    amp, x = low(nn.Sequential(part()), backend=backend), torch.randn(4, 8)
    amp(x)
    twin = again(amp[0])
    with torch.no_grad():
        for each in twin.parameters():
            each.zero_()
    results = [result[0] if isinstance(result, tuple) else result for result in (amp[0](x), twin(x))]
    assert results[0].any() and not results[1].any()


def test_shallow_copy_shares_parameters_and_stays_rewritten():
    amp = low(mlp())
    twin = copy.copy(amp)
    assert twin.first.weight is amp.first.weight and ran_low(twin(data()), mlp()(data()))


# -- again and nested ----------------------------------------------------------------------------
def test_rewriting_again_starts_from_the_original():
    model, x = mlp(), data()
    once = low(model)
    once(x)
    again = low(once, dtype="fp16")
    assert again is not once and isinstance(again, MLP) and again.first.weight is model.first.weight
    assert matmul_dtypes(again, x) == {torch.float16} and matmul_dtypes(once, x) == {torch.bfloat16}
    assert torch.equal(low(low(low(model)))(x), once(x))
    assert type(again).__mro__[1:4] == (Rewritten, RewrittenBase, MLP)


def test_rewritten_part_of_a_model_that_is_not():
    model = nn.Sequential(nn.Linear(8, 8), mlp())
    x = data()
    want = model(x)
    model[1] = low(model[1])
    assert ran_low(model(x), want)
    assert matmul_dtypes(model, x) == {torch.float32, torch.bfloat16}


def test_rewriting_a_model_with_a_rewritten_part_takes_the_part_over():
    model = nn.Sequential(nn.Linear(8, 8), mlp())
    x = data()
    want = model(x)
    inner = low(model[1], dtype="fp16")
    model[1] = inner
    amp = low(model)
    assert ran_low(amp(x), want)
    assert matmul_dtypes(amp, x) == {torch.bfloat16} and len(amp.plan.regions) == 1
    assert model[1] is inner and matmul_dtypes(inner, x) == {torch.float16}
    assert isinstance(amp[1], MLP)
    amp.eval()
    assert model[1].training


def test_rewritten_part_put_in_later_keeps_its_own_rewrite():
    x, amp = data(), low(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    amp(x)
    amp.append(low(mlp(), dtype="fp16"))
    for _ in range(2):
        assert matmul_dtypes(amp, x) == {torch.bfloat16, torch.float16}


# -- bad input -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "model, error, word",
    [
        pytest.param(lambda: torch.relu, PolicyError, "nn.Module", id="a function"),
        pytest.param(lambda: "bert", PolicyError, "nn.Module", id="a string"),
        pytest.param(lambda: MLP, PolicyError, "nn.Module", id="a class"),
        pytest.param(lambda: torch.jit.script(nn.Linear(2, 2)), CaptureError, "TorchScript", id="a ScriptModule"),
        pytest.param(lambda: torch.compile(mlp()), CaptureError, "backend=", id="an OptimizedModule"),
        pytest.param(lambda: nn.Sequential(nn.LazyLinear(4)), CaptureError, r"0\.weight .* lazy .*call the model once", id="lazy"),
        pytest.param(lambda: mlp().half(), PolicyError, r"first\.weight .* are fp16 already.*float\(\)", id="half parameters"),
        pytest.param(lambda: mlp().bfloat16(), PolicyError, "first.weight", id="bf16 parameters"),
    ],
)
def test_bad_models(model, error, word):
    with pytest.raises(error, match=word):
        low(model())


@pytest.mark.parametrize(
    "options, word",
    [
        ({"dtype": "int8"}, "int8"),
        ({"backend": "no such backend"}, "no such backend"),
        ({"overrides": {"softmaxx": "deny"}}, "softmax"),
        ({"overrides": {"module:frist": "fp32"}}, "module:first"),
        ({"lists": "defalut"}, "defalut"),
        ({"optimizer": "adam"}, "Optimizer"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "owns none"),
        ({"plan": "plan.json"}, "from_json"),
        ({"example_inputs": data()}, "tuple"),
    ],
)
def test_bad_options(options, word):
    with pytest.raises((PolicyError, amprewrite.OpListError), match=word):
        low(mlp(), **options)


def test_bad_node_override_fails_at_every_call():
    amp = low(mlp(), overrides={"node:linaer_1": "high"})
    for _ in range(2):
        with pytest.raises(PolicyError, match="node:linear_1"):
            amp(data())


class Beside(nn.Module):
    """A model with modules that an override by module cannot reach: of one the parent reads the weight, and one runs in training alone."""

    def __init__(self):
        super().__init__()
        self.first, self.held, self.aux = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = nn.functional.linear(self.first(x), self.held.weight)
        return self.aux(x) if self.training else x


def test_a_module_override_without_an_op_is_said_once():
    amp = low(Beside().eval(), overrides={"module:first": "fp32", "module:held": "fp32", "module:aux": "fp32"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            amp(data(2, 8))
    said = [str(each.message) for each in caught if "decides nothing so far" in str(each.message)]
    assert [text.partition("]")[0] for text in said] == ["overrides['module:held'", "overrides['module:aux'"]
    amp = low(Beside(), overrides={"module:aux": "fp32"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpRewriteWarning)
        amp(data(2, 8))
    assert [node.colour.value for node in amp.plan.nodes if node.module == "aux" and node.op == "linear"] == ["high"]


def test_an_op_override_without_an_op_is_a_note_of_the_plan():
    """A softmax inside fused attention is no op of its own: who asks for it in fp32 can read that nothing changed."""
    amp = low(Beside().eval(), overrides={"softmax": "fp32", "linear": "fp32"})
    amp(data(2, 8))
    said = [note for note in amp.plan.notes if "decides nothing" in note]
    assert said == ["overrides['softmax'] decides nothing here: no graph has this op"]


def test_contradicting_overrides_name_both():
    with pytest.raises(PolicyError, match=r"first.*fir|fir.*first"):
        low(mlp(), overrides={"module:firs?": "high", "module:fi?st": "low"})(data())


def test_a_failed_capture_leaves_nothing_behind(monkeypatch):
    model, x = mlp(), data()
    amp = low(model)
    with monkeypatch.context() as patch:
        patch.setattr(graph_rewriter, "rewrite_graph", lambda program: (_ for _ in ()).throw(PlanError("no luck")))
        with pytest.raises(PlanError, match="no luck"):
            amp(x)
    assert ran_low(amp(x), model(x))
    with pytest.raises(RuntimeError):
        amp(data(3, 5))
    assert ran_low(amp(x), model(x))


def test_a_graph_that_cannot_be_rewritten_stays_fp32_and_says_so(monkeypatch):
    model, x = mlp(), data()

    def refuse(program):
        raise amprewrite.PassError("cannot")

    monkeypatch.setattr(graph_rewriter, "rewrite_graph", refuse)
    amp = low(model)
    with pytest.warns(amprewrite.AmpRewriteWarning, match="stays fp32.*cannot"):
        assert torch.equal(amp(x), model(x))
    assert "cannot" in str(amp.plan.skipped)
    with pytest.raises(amprewrite.PassError):
        low(model, strict=True)(x)


def test_a_failure_while_a_graph_is_read_ends_no_call(monkeypatch):
    def fails(*args):
        raise NotImplementedError("no storage here")

    monkeypatch.setattr("amprewrite.passes.driver.read_graph", fails)
    model, x = mlp(), data()
    amp = low(model)
    with pytest.warns(amprewrite.AmpRewriteWarning, match="stays fp32.*NotImplementedError: no storage here"):
        assert torch.equal(amp(x), model(x))
    with pytest.raises(amprewrite.PassError, match="reading graph0 failed"):
        low(model, strict=True)(x)
