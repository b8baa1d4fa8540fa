"""What a model says about precision under torch.autocast it says here: it is told, while it is captured, that autocast is on, for fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables import torch as torch_functions
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.runtime.compiler.heard import regions_around
from amprewrite.tables.vocabulary import Colour, Reason

OFF = (Colour.HIGH, Reason.INSIDE_AUTOCAST)


@contextlib.contextmanager
def maybe_autocast(device: str, enabled: bool) -> Iterator[None]:
    if torch.is_autocast_enabled(device) or enabled:
        with torch.autocast(device, enabled=enabled):
            yield
    else:
        yield


class Asks(nn.Module):
    """A product in fp32 on the model's own word, and one that says nothing."""

    def __init__(self, region: Callable[[], Any], width: int = 64) -> None:
        super().__init__()
        self.region, self.inside, self.outside = region, nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with self.region():
            x = self.inside(x)
        return self.outside(x)


class Answers(nn.Module):
    """Returns what a question gives, as a number beside a product."""

    def __init__(self, question: Callable[[], Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.question, self.linear = question, nn.Linear(64, 64, dtype=dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return self.linear(x), self.question()


def products(amp: Any) -> dict[str, tuple[Colour, Reason]]:
    return {node.module: (node.colour, node.reason) for node in amp.plan.nodes if node.flops}


REGIONS: dict[str, Callable[[], Any]] = {
    "switched off": lambda: torch.autocast("cpu", enabled=False),
    "switched off if on": lambda: maybe_autocast("cpu", enabled=False),
    "cpu.amp": lambda: torch.amp.autocast("cpu", enabled=not torch.is_autocast_enabled("cpu")),
}


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("region", REGIONS)
def test_a_region_of_the_model_is_heard(region: str, low: str) -> None:
    amp = amprewrite.rewrite(Asks(REGIONS[region]), dtype=low, device="h100")
    x = torch.randn(1024, 64)
    for _ in range(2):
        amp(x)
    assert products(amp)["inside"] == OFF and products(amp)["outside"][0] is Colour.LOW
    assert len(amp.plan.regions) == 1


AGAIN: dict[str, Callable[[], Any]] = {
    "both": lambda: torch.autocast("cpu", dtype=torch.get_autocast_dtype("cpu"), enabled=torch.is_autocast_enabled("cpu")),
    "kept in a dict": lambda: torch.autocast("cpu", **{"enabled": torch.is_autocast_enabled("cpu"), "cache_enabled": False}),
    "cpu.amp": lambda: torch.cpu.amp.autocast(torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()),
}


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning")
@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("region", AGAIN)
def test_a_region_that_is_entered_with_what_was_heard_is_none(region: str, low: str) -> None:
    model, x = Asks(AGAIN[region]), torch.randn(64, 64)
    amp = amprewrite.rewrite(model, dtype=low)
    for _ in range(2):
        got = amp(x)
    assert [colour for colour, _ in products(amp).values()] == [Colour.LOW, Colour.LOW]
    assert (got - model(x)).norm() < (0.02 if low == "bf16" else 0.002) * got.norm()


@pytest.mark.parametrize("asked", [None, torch.float32])
def test_the_backward_of_custom_bwd_runs_as_its_forward(asked: torch.dtype | None) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=asked)
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return g @ w.t(), x.t() @ g

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return Product.apply(self.a(x), self.a.weight)  # type: ignore[no-any-return, no-untyped-call]

    amp = amprewrite.rewrite(Net(), dtype="bf16")
    amp(torch.randn(64, 64)).sum().backward()
    assert {node.dtype for region in amp.plan.regions if "body" in region.name for node in region.nodes if node.flops} == {
        "fp32" if asked else "bf16"
    }


QUESTIONS: dict[str, tuple[Callable[[], Any], Any]] = {
    "on here": (lambda: torch.is_autocast_enabled("cpu"), True),
    "on for a device without the model": (lambda: torch.is_autocast_enabled("cuda"), False),
    "on for CUDA, by default": (lambda: torch.is_autocast_enabled(), False),
    "on for a CPU, as it was spelled": (lambda: torch.is_autocast_cpu_enabled(), True),
    "the dtype": (lambda: torch.get_autocast_dtype("cpu"), torch.float32),
    "the dtype for a CPU, as it was spelled": (lambda: torch.get_autocast_cpu_dtype(), torch.float32),
    "anywhere": (lambda: torch._C._is_any_autocast_enabled(), True),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_questions_are_answered_as_under_autocast_for_fp32(question: str) -> None:
    ask, told = QUESTIONS[question]
    amp, x = amprewrite.rewrite(Answers(ask), dtype="bf16", device="h100"), torch.randn(4, 64)
    assert amp(x)[1] == told and amp(x)[1] == told


def test_inside_a_region_the_answer_is_true() -> None:
    def inside() -> tuple[bool, bool]:
        with torch.autocast("cpu", enabled=False):
            off = torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return off, torch.is_autocast_enabled("cpu")

    assert amprewrite.rewrite(Answers(inside), dtype="bf16", device="h100")(torch.randn(4, 64))[1] == (False, True)


def test_a_model_that_holds_half_values_is_told_the_truth() -> None:
    """It asks whether autocast would make dtypes agree."""
    half = Answers(lambda: torch.is_autocast_enabled("cpu"), torch.bfloat16).requires_grad_(False).eval()
    amp = amprewrite.rewrite(half, dtype="bf16", device="h100")
    assert amp(torch.randn(4, 64, dtype=torch.bfloat16))[1] is False


def test_a_call_with_half_values_is_told_the_truth() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x if torch.is_autocast_enabled("cpu") else x.float())

    amp = amprewrite.rewrite(Casts(), dtype="bf16", device="h100")
    amp(torch.randn(4, 64))
    assert amp(torch.randn(4, 64, dtype=torch.bfloat16)).dtype is torch.float32


def test_code_of_pytorch_is_told_the_truth() -> None:
    """It asks to choose kernels: an encoder keeps its fused one."""
    encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    amp, x = amprewrite.rewrite(encoder, dtype="bf16", device="h100"), torch.randn(2, 8, 64)
    with torch.no_grad():
        amp(x)
    assert "_transformer_encoder_layer_fwd" in {node.op for node in amp.plan.nodes}


def test_a_warning_of_pytorch_breaks_no_graph_and_is_given_in_each_call() -> None:
    """After a break in code of PyTorch, Dynamo leaves the rest of it as written."""
    attention, x, padding, mask = nn.MultiheadAttention(64, 4), torch.randn(8, 2, 64), torch.zeros(2, 8).bool(), torch.zeros(8, 8)
    amp = amprewrite.rewrite(attention, dtype="bf16")
    for _ in range(2):
        with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask") as told:
            amp(x, x, x, padding, attn_mask=mask)
        assert len(told) == 1
    assert [node.colour for node in amp.plan.nodes if node.flops] == [Colour.LOW]


def test_an_op_that_autocast_refuses_runs() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.binary_cross_entropy(self.linear(x).sigmoid(), y)

    amp = amprewrite.rewrite(Loss(), dtype="bf16", device="h100")
    assert torch.isfinite(amp(torch.randn(8, 64), torch.rand(8, 1)))


def test_nothing_is_left_behind() -> None:
    """Dynamo's tables are put back, also after an error, and other compiled functions hear the truth."""

    def fails() -> bool:
        raise ValueError(torch.is_autocast_enabled("cpu"))

    folded, handlers = dict(torch_functions.constant_fold_functions), torch_functions.TorchInGraphFunctionVariable._get_handlers()
    names = set(handlers)
    with pytest.raises(ValueError):
        amprewrite.rewrite(Answers(fails), dtype="bf16", device="h100")(torch.randn(4, 64))
    amprewrite.rewrite(Answers(lambda: torch.is_autocast_enabled("cpu")), dtype="bf16", device="h100")(torch.randn(4, 64))
    assert dict(torch_functions.constant_fold_functions) == folded and set(handlers) == names
    assert not torch.is_autocast_enabled("cpu") and not regions_around()
    told = torch.compile(lambda x: x + torch.is_autocast_enabled("cpu"), backend="eager")
    assert float(told(torch.zeros(1))) == 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["off", "bf16"])
def test_a_part_that_is_called_inside_a_region_runs_as_the_region_says(dtype: torch.dtype | None) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(64, 64))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", enabled=dtype is not None, dtype=dtype or torch.bfloat16):
                inside = self.part(x)
            return inside, self.part(x)

    torch.manual_seed(0)
    model, x = Parts(), torch.randn(64, 64)
    amp = amprewrite.rewrite(model, dtype="fp16", device="h100", granularity=("part",))
    (inside, outside), (want, full) = amp(x), model(x)
    assert torch.equal(inside, want) and inside.dtype is want.dtype
    assert not torch.equal(outside, full) and outside.dtype is torch.float32
    assert any("autocast region of the model's own" in note for note in amp.plan.notes)


class Parts(nn.Module):
    """Parts in regions of the model's own: around an activation checkpoint, inside it, or around every second call."""

    def __init__(self, where: str, dtype: torch.dtype | None, kept: Callable[..., Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2))
        self.where, self.dtype, self.kept = where, dtype, kept

    def region(self) -> Any:
        return torch.autocast("cpu", enabled=self.dtype is not None, dtype=self.dtype or torch.bfloat16)

    def body(self, part: nn.Module, x: Tensor) -> Tensor:
        with self.region():
            return part(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            if self.where == "inside":
                x = x + self.kept(self.body, part, x)
                continue
            with self.region():
                x = x + self.kept(part, x)
            if self.where == "twice":
                x = x + self.kept(part, x)
        return x


CHECKPOINTS = {"saved": partial(checkpoint, use_reentrant=False), "reentrant": partial(checkpoint, use_reentrant=True)}


def gradients(model: nn.Module, x: Tensor, steps: int) -> list[Tensor]:
    """Gradients of several forwards, all before the first backward."""
    model.zero_grad()
    losses = [model(x.mul(number + 1).requires_grad_()).float().square().mean() for number in range(steps)]
    for loss in losses:
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["off", "bf16"])
@pytest.mark.parametrize("kept", CHECKPOINTS)
@pytest.mark.parametrize("where", ["around", "inside"])
def test_a_part_is_recomputed_as_the_region_of_its_forward_says(where: str, kept: str, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, x = Parts(where, dtype, CHECKPOINTS[kept]), torch.randn(16, 64)
    amp = amprewrite.rewrite(model, dtype="fp16", device="h100", granularity="blocks")
    assert torch.equal(amp(x), model(x))
    assert all(torch.equal(*pair) for pair in zip(gradients(amp, x, 2), gradients(model, x, 2), strict=True))


@pytest.mark.parametrize("kept", CHECKPOINTS)
def test_a_part_in_and_out_of_regions_is_recomputed_as_each_of_its_calls_ran(kept: str) -> None:
    torch.manual_seed(0)
    saved, plain, x = Parts("twice", None, CHECKPOINTS[kept]), Parts("twice", None, lambda part, x: part(x)), torch.randn(16, 64)
    plain.load_state_dict(saved.state_dict())
    got, want = (gradients(amprewrite.rewrite(each, dtype="bf16", device="h100", granularity="blocks"), x, 3) for each in (saved, plain))
    for each, right, full in zip(got, want, gradients(saved, x, 3), strict=True):
        assert float((each - right).norm() / right.norm()) < 1e-6 < 1e-4 < float((full - right).norm() / right.norm())


def test_exports_hear_regions() -> None:
    amp, x = amprewrite.rewrite(Asks(REGIONS["switched off if on"]).eval(), dtype="bf16", device="h100"), torch.randn(64, 64)
    program = amp.export_program((x,))
    low = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("aten.linear")]
    assert len(low) == 1 and any("wrap_with_autocast" in str(node.target) for node in program.graph.nodes)
    assert not torch.is_autocast_enabled("cpu")


def test_onnx_exports_hear_regions(tmp_path: Any) -> None:
    pytest.importorskip("onnxscript", reason="the onnx extra is not installed")
    amp, x = amprewrite.rewrite(Asks(REGIONS["switched off if on"]).eval(), dtype="fp16", device="h100"), torch.randn(64, 64)
    report = amp.export_onnx(tmp_path / "model.onnx", (x,))
    assert next(node.reason for node in report.plan.nodes if node.flops) is Reason.INSIDE_AUTOCAST


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False):
        yield


class BreaksInside(nn.Module):
    """The graph breaks in code that a region calls, so that Dynamo captures that code by itself, without the region."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def sharp(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        torch._dynamo.graph_break()
        return self.b(x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.sharp(x)
        return self.c(x)


class BreaksInManager(BreaksInside):
    def forward(self, x: Tensor) -> Tensor:
        with switched_off():
            x = self.sharp(x)
        return self.c(x)


class BreaksInDecorator(BreaksInside):
    decorated = torch.autocast("cpu", enabled=False)(BreaksInside.sharp)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.decorated(x))


class BreaksInManagersDecorator(BreaksInDecorator):
    decorated = switched_off()(BreaksInside.sharp)


@pytest.mark.parametrize("kind", [BreaksInside, BreaksInManager, BreaksInDecorator, BreaksInManagersDecorator])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.filterwarnings("ignore:.*runs as it is written")
def test_a_region_holds_for_code_behind_a_graph_break_that_it_calls(kind: type[BreaksInside], dtype: str) -> None:
    model = kind()
    amp = amprewrite.rewrite(model, dtype=dtype)
    for _ in range(2):
        amp(torch.randn(8, 64)).square().sum().backward()
    found = [(node.dtype, node.reason) for node in amp.plan.nodes if node.flops]
    assert found == [("fp32", Reason.INSIDE_AUTOCAST)] * 2 + [(dtype, found[2][1])]
    assert all(each.grad is not None and each.grad.isfinite().all() for each in amp.parameters())
