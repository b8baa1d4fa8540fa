"""Calibration: ranges under the plan's own names, whatever form batches have; and plans that no fp16 value overflows."""

from __future__ import annotations

import copy
import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import amprewrite
from amprewrite import AmpRewriteWarning, CalibrationError, PolicyError
from amprewrite.accuracy.verify import verify
from amprewrite.tables.vocabulary import Colour, Reason


class Net(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.up.weight.mul_(scale)

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        return self.down(hidden if shift is None else hidden + shift)


def batches(n: int = 3, size: int = 4) -> list[torch.Tensor]:
    return [torch.randn(size, 8) for _ in range(n)]


# what is seen ---------------------------------------------------------------------------------------------------------


def test_ranges_bear_the_names_of_the_plan() -> None:
    model, data = Net(), batches()
    found = amprewrite.calibrate(model, data)
    plan = amprewrite.plan(model, (data[0],), dtype="fp16")
    (region,) = found.regions
    assert set(region.values) == {node.name for node in plan.nodes if node.dtype and node.role != "output"}
    with torch.no_grad():
        ups = [model.up(x) for x in data]
    assert region.values["linear"].amax == pytest.approx(max(up.abs().max().item() for up in ups))
    assert (region.values["linear"].count, region.values["linear"].batches) == (3 * 4 * 16, 3)
    assert region.values["relu"].zeros == sum(int((up <= 0).sum()) for up in ups)
    assert region.values["up.weight"].count == model.up.weight.numel(), "a weight is looked at once"


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x,
        lambda x: (x,),
        lambda x: [x, torch.zeros(16)],
        lambda x: {"x": x},
        lambda x: {"x": x, "shift": torch.zeros(16)},
    ],
    ids=["tensor", "tuple", "list", "mapping", "two keywords"],
)
def test_batches_in_every_form(form: Callable[[torch.Tensor], Any]) -> None:
    assert amprewrite.calibrate(Net(), [form(x) for x in batches()]).batches == 3


def test_a_dataloader_with_labels_needs_to_be_told_how_to_call() -> None:
    loader = DataLoader(TensorDataset(torch.randn(8, 8), torch.randn(8, 1), torch.randn(8, 1)), batch_size=3)
    with pytest.raises(CalibrationError, match=r"a batch is a list of 3, and Net takes 2 arguments \(x, shift\)"):
        amprewrite.calibrate(Net(), loader)
    found = amprewrite.calibrate(Net(), loader, forward=lambda model, batch: model(batch[0]))
    assert found.regions[0].values["x"].count == 8 * 8, "the last batch is smaller, and counts"


def test_integers_have_no_ranges() -> None:
    model = nn.Sequential(nn.Embedding(50_000, 4), nn.Linear(4, 4))
    found = amprewrite.calibrate(model, [torch.randint(0, 50_000, (2, 5))])
    assert "input" not in found.regions[0].values
    plan = amprewrite.rewrite(model, dtype="fp16", calibration=found, example_inputs=(torch.randint(0, 50_000, (2, 5)),)).plan
    assert next(node for node in plan.nodes if node.op == "linear").colour is Colour.LOW


def test_gradients_when_asked() -> None:
    model = Net()
    (x,) = batches(1)
    found = amprewrite.calibrate(model, [x], loss=lambda y: 1000 * y.sum())
    assert found.regions[0].gradients["linear_1"].amax == 1000
    assert found.regions[0].gradients["linear_1"].count == 16
    assert all(p.grad is None for p in model.parameters())
    assert not amprewrite.calibrate(model, [x]).regions[0].gradients
    with pytest.raises(CalibrationError, match=r"scalar tensor, not a tensor of shape \(4, 4\)"):
        amprewrite.calibrate(model, [x], loss=lambda y: y)
    with pytest.raises(CalibrationError, match="does not depend on any parameter"):
        amprewrite.calibrate(model, [x], loss=lambda y: y.detach().sum())


class Forces(nn.Module):
    """Takes the gradient of its energy itself, outside of its graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return -torch.autograd.grad(self.down(torch.tanh(self.up(x))).sum(), x)[0]


def test_a_model_that_takes_gradients_itself_runs_with_them() -> None:
    model, data = Forces(), batches()
    found = amprewrite.calibrate(model, data)
    (seen,) = (region.values for region in found.regions if "tanh" in region.values)
    assert (seen["tanh"].count, seen["tanh"].batches) == (3 * 4 * 16, 3), "each batch counts once"
    assert all(region.values["neg"].batches == 3 for region in found.regions if "neg" in region.values)
    with torch.no_grad():
        model.down.weight.mul_(1e7)
    plan = amprewrite.rewrite(model, dtype="fp16", calibration=data, example_inputs=(data[0],)).plan
    assert Reason.OUT_OF_RANGE in {node.reason for node in plan.nodes}


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = batches()
    state = torch.get_rng_state()
    amprewrite.calibrate(model, data)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


class Averaging(nn.Module):
    """Its products read a running mean that the forward has just written, so backward needs the written values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.detach().std(0))
        return x * self.mean


@pytest.mark.parametrize(
    "measure",
    [
        lambda model, x: amprewrite.calibrate(model, [x, x], loss=lambda y: y.square().mean()).regions[0].gradients,
        lambda model, x: amprewrite.debug(amprewrite.rewrite(model, dtype="fp16"), (x,)).gradients,
        lambda model, x: amprewrite.sensitivity(model, [x]).causes,
    ],
    ids=["calibrate", "debug", "sensitivity"],
)
def test_backward_comes_before_buffers_are_restored(measure: Callable[[nn.Module, torch.Tensor], Any]) -> None:
    model, (x,) = Averaging().train(), batches(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert measure(model, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Normalises(nn.Module):
    """Writes its input, and takes any number of further ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        x.sub_(0.5).div_(0.25)
        return self.linear(x + sum(more))


@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_is_left_as_it_was(count: int) -> None:
    model, kept = Normalises().eval(), [torch.rand(4, 8) for _ in range(count)]
    batch = tuple(x.clone() for x in kept)
    found = amprewrite.calibrate(model, [batch, batch])
    assert found.regions[0].values["x"].greatest == kept[0].max(), "both batches are seen as they were"
    assert amprewrite.sensitivity(model, [batch]).causes
    amp = amprewrite.rewrite(model, dtype="bf16", tolerance=0.05, calibration=[batch])
    assert verify(amp, batch).output_error <= 0.05
    assert all(map(torch.equal, batch, kept))


def test_buffers_do_not_move_between_batches_either() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).train()
    data = batches(1)
    once, often = (amprewrite.calibrate(model, data * n) for n in (1, 4))
    key = next(name for name in once.regions[0].values if "running_var" in name)
    assert once.regions[0].values[key].greatest == often.regions[0].values[key].greatest


def test_every_front_end_is_calibrated() -> None:
    model, data = Net().eval(), batches()
    program = torch.export.export(model, (data[0],))
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 4), nn.ReLU()))
    assert amprewrite.calibrate(program, data).batches == 3
    amp = amprewrite.rewrite(graph, dtype="fp16", calibration=data)
    amp(data[0])
    assert not any("never ran" in note for region in amp.plan.regions for note in region.notes)
    assert amprewrite.calibrate(amprewrite.rewrite(model, dtype="fp16"), data).regions[0].values


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Net(3e5), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(checkpoint(self.inner, x, use_reentrant=False))
        return out


def test_bodies_of_checkpoints_are_calibrated() -> None:
    model, data = Checkpointed(), batches()
    found = amprewrite.calibrate(model, data)
    assert len(found.regions) == 2
    amp = amprewrite.rewrite(model, dtype="fp16", calibration=found)
    amp(data[0])
    body = amp.plan.regions[1]
    assert {node.name: node.reason for node in body.nodes}["linear"] is Reason.OUT_OF_RANGE


@pytest.mark.long
def test_memory_does_not_grow_with_the_batches() -> None:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])

    def peak(n: int) -> int:
        def each() -> Iterator[torch.Tensor]:
            for _ in range(n):
                yield torch.randn(16, 32)

        gc.collect()
        tracemalloc.start()
        amprewrite.calibrate(model, each(), progress=False)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(1)
    rounds = 3  # when cycles are collected moves a peak by a quarter
    assert min(peak(60) for _ in range(rounds)) <= 1.2 * min(peak(1) for _ in range(rounds))


def test_calibrations_of_halves_merge_into_that_of_the_whole() -> None:
    model, data = Net(), batches(4)
    halves = amprewrite.calibrate(model, data[:2]) | amprewrite.calibrate(model, data[2:])
    whole = amprewrite.calibrate(model, data)
    assert halves.batches == whole.batches
    for name in ("x", "linear", "relu", "linear_1"):
        assert halves.regions[0].values[name] == whole.regions[0].values[name]


def test_what_is_written_in_place_is_read_as_it_is_then() -> None:
    """The view and the layer's result are read after the write: their ranges have it."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            t = self.first(x)
            row = t.view(-1)
            t.mul_(2.0**17)
            out: torch.Tensor = (self.last(t).sum() + row.sum()) * 2.0**-17
            return out

    (found,) = amprewrite.calibrate(Writes(), [torch.ones(2, 8)]).regions
    assert found.values["linear"].amax > 10_000 and found.values["view"].amax > 10_000


# bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "there is no batch"),
        (iter(()), "there is no batch"),
        (torch.randn(4, 8), "takes an iterable of batches"),
        ({"x": torch.randn(4, 8)}, "takes an iterable of batches"),
        (3, "takes an iterable of batches"),
        ([torch.randn(4, 8), (torch.randn(4, 8),)], "batch 1 is built otherwise than the first"),
        ([torch.randn(4, 8), torch.randn(4, 8).double()], r"float64\[2d\] where that has float32\[2d\]"),
        ([torch.randn(4, 8), torch.full((4, 8), float("nan"))], "batch 1 holds NaN or infinite values"),
        ([{"x": torch.full((4, 8), float("inf"))}], "batch 0 holds NaN or infinite values"),
    ],
)  # fmt: skip
def test_bad_batches(data: Any, says: str) -> None:
    with pytest.raises(CalibrationError, match=says):
        amprewrite.calibrate(Net(), data)


def test_a_calibration_of_another_model_is_refused() -> None:
    found = amprewrite.calibrate(Net(), batches())
    with pytest.raises(CalibrationError, match="made with a Net of other parameters"):
        amprewrite.rewrite(nn.Linear(8, 8), dtype="fp16", calibration=found)


# plans ----------------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A stream that grows from block to block, as in deep pre-norm networks."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(6))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        for depth, block in enumerate(self.blocks):
            nn.init.normal_(block.weight, std=6.0**depth * 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return torch.nn.functional.layer_norm(x, (8,))


class T5Like(nn.Module):
    """flan-T5's `wo`: a gated product that leaves fp16 before an RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.wi_0, self.wi_1, self.wo = (nn.Linear(8, 8, bias=False) for _ in range(3))
        with torch.no_grad():
            for layer in (self.wi_0, self.wi_1, self.wo):
                layer.weight.mul_(100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.wo(torch.nn.functional.gelu(self.wi_0(x)) * self.wi_1(x))
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Function(nn.Module):
    """A function behind a linear layer whose outputs have a given size."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], scale: float) -> None:
        super().__init__()
        self.linear, self.function, self.scale = nn.Linear(8, 8), function, scale
        with torch.no_grad():
            self.linear.weight.mul_(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


OVERFLOWING = {
    "flan-T5's wo": T5Like,
    "growing residual stream": Residual,
    "linear": lambda: Net(3e5),
    "softplus written out": lambda: Function(lambda x: torch.log(1 + torch.exp(x)), 40.0),
    "square above 256": lambda: Function(lambda x: (x * x).mean(-1).sqrt(), 1000.0),
    "square by pow": lambda: Function(lambda x: x.pow(2).sum(-1).rsqrt(), 1000.0),
    "log of tiny": lambda: Function(lambda x: torch.log(x.softmax(-1)), 8.0),
    "reciprocal of tiny": lambda: Function(lambda x: 1 / x.sigmoid(), 20.0),
    "cube of a sum": lambda: Function(lambda x: (x.sum(-1) ** 3) / 1e6, 100.0),
    "scaled up and down": lambda: Function(lambda x: torch.tanh(x * 1000 * 0.001), 100.0),
    "outer products": lambda: Function(lambda x: (x @ x.t() @ x @ x.t()).abs().log1p(), 30.0),
    "variance by hand": lambda: Function(lambda x: (x - x.mean(-1, keepdim=True)).square().mean(-1).sqrt(), 2000.0),
}


@pytest.mark.parametrize("name", OVERFLOWING)
def test_no_value_overflows_with_calibration(name: str) -> None:
    """Every injected overflow is found: strictly rounded, nothing overflows, and the outputs are those of fp32."""
    torch.manual_seed(0)
    model = OVERFLOWING[name]().eval()  # type: ignore[no-untyped-call]
    data = batches(6, 16)
    exact = model(data[0])
    assert bool(exact.isfinite().all()), "fp32 computes it"
    amp = amprewrite.rewrite(model, dtype="fp16", calibration=data)
    with torch.no_grad():
        assert bool(amp(data[0]).isfinite().all())
    report = verify(amp, (data[0],))
    assert not report.overflows
    assert report.output_error < 0.02


def test_real_data_never_makes_a_harmless_plan_worse() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.Softmax(-1)).eval()
    data = batches(6, 16)
    without = amprewrite.plan(model, (data[0],), dtype="fp16")
    amp = amprewrite.rewrite(model, dtype="fp16", calibration=data, example_inputs=(data[0],))
    assert not without.diff(amp.plan)


def test_plans_say_what_was_seen() -> None:
    data = batches()
    plan = amprewrite.rewrite(Net(3e5), dtype="fp16", calibration=data, example_inputs=(data[0],)).plan
    assert "linear reaches" in plan.explain("up")
    assert "fp16 ends at 65504: P(overflow) is 1 a pass" in plan.explain("up")


@pytest.mark.parametrize("granularity", ["blocks", ["0", "1", "2"]], ids=["blocks", "paths"])
def test_parts_are_calibrated_by_themselves(granularity: Any) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)), nn.Linear(8, 4))
    small, large = torch.randn(4, 8), torch.full((4, 8), 3e4)
    found = amprewrite.calibrate(model, [small, large], granularity=granularity)
    for calibration in (found, [small, large]):
        amp = amprewrite.rewrite(model, dtype="fp16", granularity=granularity, calibration=calibration, example_inputs=(small,))
        assert not any("never ran" in note for region in amp.plan.regions for note in region.notes)
        assert any(node.reason is Reason.OUT_OF_RANGE for node in amp.plan.nodes)
    with pytest.raises(PolicyError, match="granularity='parts' means nothing"):
        amprewrite.calibrate(model, [small], granularity="parts")


def test_another_mode_than_the_calibrated_one_says_so() -> None:
    class Moody(Net):
        def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x, shift) + 1 if self.training else super().forward(x, shift)

    model = Moody()
    amp = amprewrite.rewrite(model, dtype="fp16", calibration=amprewrite.calibrate(model.eval(), batches()))
    amp.train()(batches()[0])
    assert any("calibration never ran this graph" in note for note in amp.plan.regions[0].notes)
    amp.eval()(batches()[0])
    assert not amp.plan.regions[-1].notes


# first calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_a_first_call_that_overflows_is_decided_anew(training: bool) -> None:
    model, (x,) = Net(3e5).train(training), batches(1)
    amp = amprewrite.rewrite(model, dtype="fp16")
    with torch.set_grad_enabled(training):
        out = amp(x)
    torch.testing.assert_close(out, model(x), rtol=1e-3, atol=1e-2)
    (region,) = amp.plan.regions
    assert "decided anew with the ranges seen in it" in region.notes[0]
    assert next(node for node in region.nodes if node.name == "linear").reason is Reason.OUT_OF_RANGE
    if training:
        out.sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in amp.parameters() if p.grad is not None)


class Twice(nn.Module):
    """Calls one block under an activation checkpoint with usual values, and then with large ones."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return checkpoint(self.block, h * 1e6, use_reentrant=self.use_reentrant) * 1e-9


class Nested(Twice):
    """The large values are inside a checkpoint inside another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, self.block(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("granularity", ["model", ["block"]], ids=["model", "parts"])
@pytest.mark.parametrize("kind", [Twice, Nested])
def test_a_checkpoint_that_overflows_in_a_first_call(kind: type[Twice], granularity: Any, use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = kind(use_reentrant)
    want, amp = copy.deepcopy(model), amprewrite.rewrite(model, dtype="fp16", granularity=granularity, loss_scale=1.0)
    for _ in range(3):
        x = torch.randn(8, 4)
        found = []
        for net in (want, amp):
            leaf = x.clone().requires_grad_()
            net(leaf).sum().backward()
            found.append(leaf.grad)
        torch.testing.assert_close(found[1], found[0], rtol=0.01, atol=1e-4)
    for mine, theirs in zip(amp.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.01, atol=1e-4)


class Scaled(Nested):
    """The outer checkpoint alone brings what the inner one gives back into range, in an op that the lists put low."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.scaled, x, use_reentrant=self.use_reentrant)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x * 1e6, use_reentrant=self.use_reentrant) * 1e-6  # type: ignore[no-any-return]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_an_inner_checkpoint_gives_is_seen(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Scaled(use_reentrant)
    want, amp = copy.deepcopy(model), amprewrite.rewrite(model, dtype="fp16", lists="o2")
    for _ in range(2):
        x = torch.randn(8, 4, requires_grad=True)
        torch.testing.assert_close(amp(x), want(x), rtol=0.01, atol=1e-2)


def test_state_written_by_the_call_is_written_once() -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__(3e5)
            self.register_buffer("seen", torch.zeros(()))
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
            self.seen += 1.0
            return super().forward(self.drop(x), shift)

    (x,) = batches(1)
    torch.manual_seed(3)
    amp = amprewrite.rewrite(Counting(), dtype="fp16")
    amp.train()
    torch.manual_seed(5)
    first = amp(x)
    assert amp.seen == 1
    torch.manual_seed(5)
    torch.testing.assert_close(amp(x), first)
    assert amp.seen == 2


def test_infinities_that_the_model_means_change_nothing() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.linear(x)
            return scores.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf)

    amp = amprewrite.rewrite(Masked(), dtype="fp16", example_inputs=(torch.randn(8, 8),))
    assert not amp.plan.regions[0].notes
    assert amp.plan.nodes[-2].colour is not Colour.PLAIN


def test_what_cannot_be_helped_warns() -> None:
    """An override that insists on fp16 gives infinities, and says so."""
    amp = amprewrite.rewrite(Net(3e5), dtype="fp16", overrides={"linear": "low", "module:up": "low", "module:down": "low"})
    with pytest.warns(AmpRewriteWarning, match="gives NaN or infinities in fp16 where fp32 gives none"), torch.no_grad():
        amp(batches(1)[0])


def test_bf16_and_given_plans_are_not_watched() -> None:
    (x,) = batches(1)
    plan = amprewrite.plan(Net(), (x,), dtype="fp16")
    with torch.no_grad():
        out = amprewrite.rewrite(Net(3e5), plan=plan)(x)
    assert not bool(out.isfinite().all()), "a plan that was given is followed"


class Gate(torch.autograd.Function):
    """Gives None to a value that it reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * gate.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def test_values_whose_gradient_is_none_are_measured_without_it() -> None:
    class Gated(Net):
        def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
            hidden = self.up(x)
            return self.down(Gate.apply(hidden, torch.tanh(hidden)))

    found = amprewrite.calibrate(Gated(), batches(1), loss=torch.sum).regions[0]
    assert {"linear", "linear_1"} <= found.gradients.keys() < found.values.keys()
    assert amprewrite.sensitivity(Gated(), batches(1))
    amp = amprewrite.rewrite(Gated(), dtype="fp16")
    assert not amprewrite.debug(amp, (batches(1)[0],), backward=True, loss=torch.mean).findings
