"""What models do inside: autocast, no_grad, checkpoint, custom Functions, control flow, scripted and compiled parts."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from runtime_help import MLP, Broken, data, low, matmul_dtypes, mlp, ran_low
from torch import nn
from torch.utils.checkpoint import checkpoint
from versions import TORCH

from amprewrite import AmpRewriteWarning, CaptureError


def check_training(model: nn.Module, *args, low_grads: bool = True, **options) -> nn.Module:
    """Output and gradients close to fp32, fp32 themselves, and not the same bits: twice, so that caches are hit too."""
    twin = copy.deepcopy(model)
    amp = low(model, **options)
    for _ in range(2):
        amp.zero_grad(), twin.zero_grad()
        got, want = amp(*args), twin(*args)
        assert ran_low(got, want)
        got.square().mean().backward(), want.square().mean().backward()
        for mine, theirs in zip(amp.parameters(), twin.parameters(), strict=True):
            assert mine.grad.dtype == torch.float32
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.1, atol=0.05)
    return amp


def test_no_grad_inside():
    class Teacher(MLP):
        def forward(self, x):
            with torch.no_grad():
                target = self.first(x).softmax(-1)
            return self.second(torch.relu(self.first(x))) * target.mean()

    assert matmul_dtypes(check_training(Teacher(), data()), data()) == {torch.bfloat16}


def test_autocast_inside_keeps_its_region():
    class Own(MLP):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                y = self.first(x)
            with torch.autocast("cpu", enabled=False):
                return self.second(torch.relu(y.float()))

    model, x = Own(), data()
    amp = low(model)
    with pytest.warns(AmpRewriteWarning, match="Own runs its matmuls and convolutions under a torch.autocast of its own"):
        got = amp(x)
    want = model(x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_inside(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=reentrant)
            return x

    torch.manual_seed(0)
    check_training(Checkpointed(), data().requires_grad_())


@pytest.mark.parametrize("called", ["module", "function"])
def test_checkpoint_that_capture_cannot_read(called):
    """The block runs as it is written around its modules, in forward and again in backward."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Broken()
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            inner = self.block if called == "module" else lambda y: self.block(y) * 2
            return self.head(checkpoint(inner, x, use_reentrant=False))

    torch.manual_seed(0)
    model, x = Checkpointed(), data().requires_grad_()
    amp = low(model)
    out = amp(x)
    assert ran_low(out, model(x))
    out.sum().backward()
    got = model.block.first.weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(got, model.block.first.weight.grad, rtol=0.1, atol=0.05)


def test_custom_autograd_function_inside():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            assert x.dtype == grad.dtype
            return grad * 2

    class Uses(MLP):
        def forward(self, x):
            return self.second(Double.apply(self.first(x)))

    torch.manual_seed(0)
    check_training(Uses(), data())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_hook_on_a_tensor_sees_its_whole_gradient_unscaled_in_fp32(dtype):
    class Clipped(MLP):
        def forward(self, x):
            y = self.first(x)
            side = self.second(y.tanh())
            if y.requires_grad:
                y.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01).float())
            return self.second(torch.relu(y)) + side

    torch.manual_seed(0)
    amp = check_training(Clipped(), data(), dtype=dtype, strict=TORCH >= (2, 13))  # before, the hook breaks the graph
    assert {node.colour.value for node in amp.plan.find("second")} == {"low"}
    with torch.no_grad():
        assert amp(data()).dtype == torch.float32


@pytest.mark.skipif(TORCH < (2, 13), reason="the hook breaks the graph")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("where", ["inside", "same tensor", "returned"])
def test_a_product_whose_result_has_a_hook_runs_low(where, dtype):
    class Halved(MLP):
        def forward(self, x):
            y = self.first(x)
            same = nn.functional.dropout(y, 0.0) if where == "same tensor" else y
            if y.requires_grad:
                same.register_hook(lambda gradient: gradient * 0.5)
            found = self.second(torch.relu(same)).sum() + torch.relu(y).sum()
            return (found, y) if where == "returned" else found

    torch.manual_seed(0)
    model, x = Halved(), data()
    amp = low(copy.deepcopy(model), dtype=dtype)
    for each in (model, amp):
        found = each(x)
        (found[0] + found[1].sum() if where == "returned" else found).backward()
    assert {node.dtype for node in amp.plan.nodes if node.op == "linear"} == {dtype}
    for want, got in zip(model.parameters(), amp.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=0.03, atol=0.02)


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("order", ["h", "hw", "wh", "whw", "hwhw"])
def test_a_hook_on_a_given_tensor_sees_it_as_it_was_when_it_was_hooked(order, retained):
    """Dynamo registers such a hook behind the graph: on what the graph wrote, were that captured."""

    class Hooks(MLP):
        def forward(self, x):
            for letter in order:
                if letter == "h":
                    x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
                else:
                    x.mul_(3)
            return self.second(torch.relu(self.first(x)))

    torch.manual_seed(0)
    model, leaf = Hooks(), data()
    seen = []
    amp = low(copy.deepcopy(model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in (model, amp):
            leaf = leaf.detach().requires_grad_()
            given = leaf + 0
            if retained:
                given.retain_grad()
            each(given).sum().backward()
            seen.append([leaf.grad, given.grad] if retained else [leaf.grad])
    for want, got in zip(*seen, strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=1e-3)
    told = [str(each.message) for each in caught if issubclass(each.category, AmpRewriteWarning)]
    assert order == "h" or (len(told) == 1 and "x = x.clone()" in told[0] and "x = x.clone()" in str(amp.plan.skipped))
    if order != "h":
        with pytest.raises(CaptureError, match="cannot be captured whole: a tensor that it is given gets a hook"):
            low(model, strict=True)(data().requires_grad_() + 0)


def test_control_flow_on_data():
    class Flow(MLP):
        def forward(self, x):
            y = self.first(x)
            y = torch.relu(y) if y.sum() > 0 else y * 2
            return self.second(y)

    torch.manual_seed(0)
    model = Flow()
    amp = low(model)
    for x in (data(), -data(), data(5, 8)):
        assert ran_low(amp(x), model(x))
    assert len(amp.plans[-1].regions) == 2 <= len(amp.plan.regions)
    assert any("graph break" in part.why and "test_runtime_inside.py" in part.where for part in amp.plan.skipped)
    with pytest.raises(CaptureError, match=r"strict=True.*whole"):
        low(model, strict=True)(data())


def test_shapes_from_data():
    class Selects(MLP):
        def forward(self, x):
            y = self.first(x)
            kept = y[y[:, 0] > 0]
            return self.second(kept).sum(0)

    torch.manual_seed(0)
    model, x = Selects(), data(6, 8)
    amp = low(model)
    assert ran_low(amp(x), model(x)) and ran_low(amp(-x), model(-x))


@pytest.mark.parametrize("select", [torch.max, torch.sort, torch.aminmax], ids=lambda f: f.__name__)
def test_indices_beside_low_values(select):
    class Selects(MLP):
        def forward(self, x):
            y = self.first(x)
            least, other = select(y, dim=-1)
            return self.second(y - least.sum(-1, keepdim=True)), other

    torch.manual_seed(0)
    model, x = Selects(), data()
    amp = low(model)
    (got, other), (want, theirs) = amp(x), model(x)
    assert ran_low(got, want) and other.dtype == theirs.dtype
    assert not amp.plan.skipped


def test_questions_about_small_differences_are_asked_in_fp32():
    class Compares(MLP):
        def forward(self, x):
            y = self.first(x)
            return self.second(y), torch.isclose(y, y + 1e-3, rtol=0, atol=1e-4)

    torch.manual_seed(0)
    model, x = Compares(), data()
    amp = low(model, strict=True)
    (got, close), (want, theirs) = amp(x), model(x)
    assert ran_low(got, want) and torch.equal(close, theirs)


def test_writes_beside_a_vmap():
    class Mapped(MLP):
        def forward(self, x):
            y = torch.vmap(lambda row: row.cos() * row.sum())(self.first(x))
            y[:, 0] = 0
            return self.second(y)

    check_training(Mapped(), data())


def test_print_and_item_inside(capsys):
    class Talks(MLP):
        def forward(self, x):
            y = self.first(x)
            print("mean", y.mean().item())
            return self.second(y)

    model, x = Talks(), data()
    amp = low(model)
    assert ran_low(amp(x), model(x))
    assert capsys.readouterr().out.count("mean") == 2


def test_ops_in_a_frame_that_cannot_be_captured_are_said():
    class Loop(MLP):
        def forward(self, x):
            for _ in range(2):
                x = x @ x.t() @ x
                torch._dynamo.graph_break()
            return super().forward(x)

    model, x = Loop(), data()
    amp = low(model)
    with pytest.warns(AmpRewriteWarning, match="as it is written"):
        amp(x)
    assert any("as it is written" in part.why for part in amp.plan.skipped)


def test_disabled_function_inside_is_said():
    class Closed(MLP):
        @torch._dynamo.disable
        def secret(self, x):
            return x @ x.t() @ x

        def forward(self, x):
            return self.second(self.secret(self.first(x)))

    amp, x = low(Closed()), data()
    with pytest.warns(AmpRewriteWarning, match="as it is written"):
        amp(x)
    assert "disable" in str(amp.plan.skipped)


def test_scripted_part():
    model, x = nn.Sequential(nn.Linear(8, 8), torch.jit.script(mlp())), data()
    with pytest.warns(AmpRewriteWarning, match="Sequential.1 runs in fp32.*TorchScript"):
        amp = low(model)
    assert ran_low(amp(x), model(x))
    assert [part.where for part in amp.plan.skipped] == ["1"]
    with pytest.raises(CaptureError, match="TorchScript"):
        low(model, strict=True)


def test_compiled_part():
    model, x = nn.Sequential(nn.Linear(8, 8), mlp()), data()
    want = model(x)
    model[1] = torch.compile(model[1], backend="eager")
    amp = low(model)
    assert ran_low(amp(x), want)
    assert matmul_dtypes(amp, x) == {torch.bfloat16}


def test_buffers_and_random_state_after_example_inputs():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    x, state = data(), torch.get_rng_state()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    amp = low(model, example_inputs=(x,))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert str(amp.plan) and all(p.grad is None for p in model.parameters())


def test_model_without_tensor_ops():
    amp = low(nn.Identity())
    for _ in range(5):
        assert torch.equal(amp(data()), data())
    assert not amp.plan.skipped


def test_lstm_and_attention_train():
    torch.manual_seed(0)

    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(8, 8, batch_first=True)
            self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

        def forward(self, x):
            return self.block(self.lstm(x)[0])

    check_training(Mix(), data(2, 5, 8))
    amp, x = low(Mix().eval()), data(2, 5, 8)
    with torch.no_grad():
        assert amp(x).dtype == torch.float32


def test_what_capture_fails_on_runs_as_it_is_written_around_its_modules():
    @torch.library.custom_op("amprewrite_tests::no_fake", mutates_args=())
    def no_fake(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @no_fake.register_fake
    def _(x):
        raise RuntimeError("no shapes here")

    class Fails(MLP):
        def forward(self, x):
            return self.second(torch.ops.amprewrite_tests.no_fake(torch.relu(self.first(x).detach())))

    model, x = Fails(), data()
    amp = low(model)
    with pytest.warns(AmpRewriteWarning, match="as it is written, in fp32 around its modules: .*no shapes here"):
        got = amp(x)
    for out in (got, amp(x), amp(data(5, 8))[:3] * 0 + amp(x)):
        assert ran_low(out, model(x))
    assert matmul_dtypes(amp, x) == {torch.bfloat16} and "no shapes here" in str(amp.plan.skipped)
    with pytest.raises(RuntimeError):
        amp(data(3, 5))
    with pytest.raises(CaptureError):
        low(model, strict=True)(x)
