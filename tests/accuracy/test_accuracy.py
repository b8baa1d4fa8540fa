"""Accuracy on demand: nested plans, few evaluations, a target that is met or refused; and what each node costs."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import long_beyond
from torch import nn
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite import AccuracyError, CalibrationError, PolicyError
from amprewrite.accuracy.error_cut import Chain
from amprewrite.accuracy.frontier import NEIGHBOURS, bisect, planned, search
from amprewrite.accuracy.sensitivity import measure_edges
from amprewrite.accuracy.strict.metric import Metric
from amprewrite.accuracy.trial import Trial
from amprewrite.accuracy.verify import verify
from amprewrite.graphs.fx.captured import Captured
from amprewrite.runtime.options import Options
from amprewrite.tables.formats import BF16, FP16
from amprewrite.tables.vocabulary import Colour, Reason


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def stream(layers: int = 4, width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(layers)], nn.LayerNorm(width), nn.Linear(width, 8)).eval()


def data(n: int = 3, width: int = 16) -> list[torch.Tensor]:
    return [torch.randn(32, width) for _ in range(n)]


def error(amp: Any, batches: list[torch.Tensor]) -> float:
    """Root mean square of the strict errors, as a search has it."""
    return math.sqrt(sum(verify(amp, (x,)).output_error ** 2 for x in batches) / len(batches))


# sensitivity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", long_beyond(2, ["gelu_1", "layer_norm_3", "linear", "add_2"]))
def test_the_error_of_a_node_is_that_of_running_it_low_alone(name: str) -> None:
    model, batches = stream(), data()
    cause = next(cause for cause in amprewrite.sensitivity(model, batches).causes if cause.name == name)
    plan = amprewrite.plan(model, (batches[0],), dtype="bf16")
    alone = plan.edit({node.name: "high" for node in plan.nodes if node.role == "op"}).edit({name: "low"})
    measured = error(amprewrite.rewrite(model, plan=alone), batches)
    assert cause.error == pytest.approx(measured, rel=0.35)
    assert cause.error == pytest.approx(math.hypot(cause.result, cause.operands))


def test_all_edges_together_foresee_the_error_of_the_low_model() -> None:
    model, batches = stream(), data()
    trial = Trial(model, Options(BF16))
    ((_, edges),) = measure_edges(trial, batches, BF16, Metric())
    low = amprewrite.rewrite(model, dtype="bf16", lists="o3")
    assert math.sqrt(sum(edges.values())) == pytest.approx(error(low, batches), rel=0.35)


def test_worst_first_with_its_module() -> None:
    found = amprewrite.sensitivity(stream(), data(1))
    errors = [cause.error for cause in found.causes]
    assert errors == sorted(errors, reverse=True)
    assert found.causes[0].module or found.causes[0].op == "add"
    assert found.causes[0].name in str(found)


def test_ten_times_the_weight_is_ten_times_the_error() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = 10 * self.a(x) + self.b(x)
            return out

    model = Two()
    model.b.load_state_dict(model.a.state_dict())
    found = {cause.module: cause.error for cause in amprewrite.sensitivity(model, data(1)).causes if cause.op == "linear"}
    assert found["a"] == pytest.approx(10 * found["b"], rel=0.3)


def test_models_without_a_floating_output_have_no_error() -> None:
    class Index(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).argmax(-1)  # type: ignore[no-any-return]

    with pytest.raises(CalibrationError, match="no floating output of Index"):
        amprewrite.sensitivity(Index(), data(1))
    with pytest.raises(CalibrationError, match="there is no batch"):
        amprewrite.sensitivity(Index(), [])


def test_sensitivity_runs_what_the_model_computes_without_gradients() -> None:
    """In training mode a spectral norm writes its vectors by `out=` under no_grad. In inference mode nothing takes gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 4)).train()
    (x,) = data(1)
    causes = amprewrite.sensitivity(model, [x]).causes
    assert {"linear", "linear_1"} <= {cause.name for cause in causes}
    with torch.inference_mode():
        assert amprewrite.sensitivity(model, [x]).causes == causes


def test_a_model_that_takes_gradients_is_told_so() -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                x = x.requires_grad_()
                return torch.autograd.grad(torch.tanh(self.linear(x)).sum(), x, create_graph=True)[0]

    for options in ({"tolerance": 1e-2}, {"accuracy": "autocast"}):
        with pytest.raises(CalibrationError, match=r"Forces cannot be run .* without gradients: RuntimeError: .* use amprewrite\.debug"):
            amprewrite.rewrite(Forces(), dtype="bf16", calibration=data(1), **options)


class WeighedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.register_buffer("weight", torch.rand(4) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.linear(x)
        return nn.functional.cross_entropy(scores, scores.detach().argmin(-1), self.weight * 2)  # type: ignore[operator]


def normed(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (4, 4)), kind(4, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(16, 4))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [lambda: normed(nn.BatchNorm1d), lambda: normed(nn.InstanceNorm1d), WeighedLoss])
@pytest.mark.long
def test_operands_without_a_derivative_are_constants(make: Any, training: bool) -> None:
    """Running statistics and class weights take no gradient; all else that such an op reads still counts."""
    torch.manual_seed(0)
    model = make().train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    causes = {cause.op: cause for cause in amprewrite.sensitivity(model, data(2)).causes}
    norm = next(cause for op, cause in causes.items() if op in ("batch_norm", "instance_norm", "cross_entropy"))
    assert norm.operands > 0
    assert causes["linear"].error > 0
    amp = amprewrite.rewrite(model, dtype="bf16", accuracy="autocast", calibration=data(2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    amp(data(1)[0])
    assert amp.plan.regions  # type: ignore[attr-defined]


# nested plans ---------------------------------------------------------------------------------------------------------


def own(captured: Captured) -> set[str]:
    captured.know(keep_high=None)
    return {node.name for node in planned(captured).nodes if node.colour is Colour.LOW}


def test_plans_are_nested_and_end_in_fp32() -> None:
    trial, batches = Trial(stream(), Options(BF16)), data(1)
    edges = measure_edges(trial, batches, BF16, Metric())
    chain = Chain(edges, own, Metric())
    assert len(chain) > 5
    ((captured, _),) = edges
    lows = []
    for index in range(len(chain)):
        captured.know(keep_high=chain.keep_high(index))
        lows.append({node.name for node in planned(captured).nodes if node.colour is Colour.LOW})
    assert all(after <= before for before, after in itertools.pairwise(lows))
    assert not lows[-1]
    assert sorted(chain.raised) == chain.raised and sorted(chain.flops) == chain.flops


class Shared(nn.Module):
    """Two matmuls that err alike; the first takes 16 times the FLOPs of the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = nn.Linear(32, 512), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x).unflatten(-1, (16, 32)).sum(-2) / 4 + self.narrow(x)


def test_the_matmul_that_gains_most_for_its_flops_is_raised_first() -> None:
    trial = Trial(Shared().eval(), Options(BF16))
    chain = Chain(measure_edges(trial, data(1, width=32), BF16, Metric()), own, Metric())
    first = chain.keep_high(chain.raised.index(1)).graphs
    (kept,) = first.values()
    (graph,) = chain.graphs
    assert [graph.graph[name].module for name in kept if name in graph.heavy] == ["narrow"]


@settings(max_examples=300)
@given(st.integers(1, 300), st.integers(0, 300))
def test_bisection_finds_the_first_in_few_evaluations(plans: int, answer: int) -> None:
    errors = bisect(lambda index: 0.0 if index >= answer else 1.0, plans, 0.5)
    assert len(errors) <= math.ceil(math.log2(plans)) + 3
    within = [index for index, value in errors.items() if value <= 0.5]
    assert min(within, default=plans) == min(answer, plans)


def test_bisection_looks_at_neighbours() -> None:
    """Where the error is not quite monotone, a cheaper plan beside the one found may do."""
    errors = bisect(lambda index: 0.0 if index >= 50 or index == 50 - NEIGHBOURS else 1.0, 100, 0.5)
    assert min(index for index, value in errors.items() if value <= 0.5) == 50 - NEIGHBOURS


# targets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tolerance", [1e-2, 2e-3, 5e-4, 1e-5])
@pytest.mark.long
def test_a_tolerance_is_kept(tolerance: float) -> None:
    model, batches = stream(), data()
    amp = amprewrite.rewrite(model, dtype="bf16", tolerance=tolerance, calibration=batches)
    assert error(amp, batches) <= tolerance
    amp(batches[0])
    (note,) = (note for note in amp.plan.notes if "tolerance=" in note)
    assert "plans tried" in note


def test_a_loose_tolerance_costs_nothing() -> None:
    model, batches = stream(), data()
    amp = amprewrite.rewrite(model, dtype="bf16", tolerance=0.5, calibration=batches, example_inputs=(batches[0],))
    assert not amprewrite.plan(model, (batches[0],), dtype="bf16").diff(amp.plan)


def test_a_tolerance_goes_with_an_override_by_node() -> None:
    model, batches = stream(), data()
    options: dict[str, Any] = {"tolerance": 0.5, "calibration": batches, "example_inputs": (batches[0],)}
    name = next(node.name for node in amprewrite.rewrite(model, dtype="bf16", **options).plan.nodes if node.op == "linear")
    amp = amprewrite.rewrite(model, dtype="bf16", overrides={f"node:{name}": "fp32"}, **options)
    assert amp.plan.find(name)[0].dtype == "fp32"


def test_a_tighter_tolerance_takes_more_time() -> None:
    model, batches = stream(), data()
    found = [search(model, batches, Options(BF16), tolerance=t) for t in (1e-2, 2e-3, 5e-4)]
    assert [len(f.keep_high.graphs[next(iter(f.keep_high.graphs))]) for f in found] == sorted(
        len(f.keep_high.graphs[next(iter(f.keep_high.graphs))]) for f in found
    )
    assert all(f.evaluations <= math.ceil(math.log2(f.plans)) + 3 for f in found)
    assert all(f.chosen.error <= f.target for f in found)


class Masked(nn.Module):
    """Reads ids stored as floats, and a mask whose zeros and smallest numbers have a meaning."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(64, 16), nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.table(ids.long()))
        x = torch.softmax(x @ x.mT + mask, -1) @ x
        return torch.where(mask.sum(-1, keepdim=True) == 0, x, -x)


def test_the_last_bit_of_a_number_with_a_meaning_is_not_changed() -> None:
    torch.manual_seed(0)
    mask = torch.zeros(4, 16, 16)
    mask[:2, :, 8:] = torch.finfo(torch.float32).min
    batch = (torch.randint(0, 64, (4, 16)).float(), mask)
    amp = amprewrite.rewrite(Masked(), dtype="bf16", tolerance=1e-2, calibration=[batch])
    assert verify(amp, batch).output_error <= 1e-2


@pytest.mark.parametrize("residual", [True, False])
def test_a_tolerance_reaches_the_bodies_of_checkpoints(residual: bool) -> None:
    class Layers(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.again, self.blocks, self.head = again, nn.ModuleList([Block(16), Block(16)]), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                part = block if residual else nn.Sequential(block.norm, block.up, nn.GELU(), block.down)
                x = checkpoint(part, x, use_reentrant=False) if self.again else part(x)
            return self.head(x)

    (x,) = data(1)
    for tolerance in (3e-3, 1e-4):
        amp, plain = (amprewrite.rewrite(Layers(again), dtype="bf16", tolerance=tolerance, calibration=[x]) for again in (True, False))
        assert verify(amp, (x,)).output_error <= tolerance
        assert error(amp, [x]) == error(plain, [x])


def test_nodes_kept_say_what_they_cost() -> None:
    model, batches = stream(), data()
    amp = amprewrite.rewrite(model, dtype="bf16", tolerance=2e-3, calibration=batches, example_inputs=(batches[0],))
    kept = [node for node in amp.plan.nodes if node.reason is Reason.SENSITIVE]
    assert kept
    assert all("to the output's error" in node.detail for node in kept)


@pytest.mark.parametrize("low", [BF16, FP16], ids=lambda low: low.name)
@pytest.mark.long
def test_as_accurate_as_autocast_with_fewer_casts(low: Any) -> None:
    model, batches = stream(6), data(4)
    found = search(model, batches, Options(low), accuracy="autocast")
    theirs = next(each for each in found.candidates if each.name == "torch.autocast's rules")
    assert found.chosen.error <= theirs.error
    assert found.chosen.activation_casts <= theirs.activation_casts
    amp = amprewrite.rewrite(model, dtype=low.name, accuracy="autocast", calibration=batches)
    assert error(amp, batches) == pytest.approx(found.chosen.error, rel=1e-3)


def test_example_inputs_are_data_too() -> None:
    (x,) = data(1)
    amp = amprewrite.rewrite(stream(), dtype="bf16", accuracy="autocast", example_inputs=(x,))
    assert any("accuracy='autocast'" in note for note in amp.plan.notes)


def test_graphs_that_the_search_never_met_say_so() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x)
            return out.exp() if self.training else out

    amp = amprewrite.rewrite(Moody().eval(), dtype="bf16", tolerance=1e-4, calibration=data())
    amp.train()(data(1)[0])
    assert any("never ran this graph" in note for note in amp.plan.regions[0].notes)


# the frontier ---------------------------------------------------------------------------------------------------------


def test_the_frontier_is_a_table_and_a_plot(tmp_path: Path) -> None:
    found = search(stream(), data(), Options(BF16), tolerance=2e-3)
    text = str(found)
    assert f"{found.evaluations} of {found.plans} nested plans tried" in text
    assert f"* {found.chosen.name}" in text
    assert "(relative L2)" in " ".join(text.split())
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, from the extra amprewrite[plot]")
    found.plot(tmp_path / "frontier.svg")
    assert "<svg" in (tmp_path / "frontier.svg").read_text()


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(amprewrite.MissingPackageError, match=r"amprewrite\[plot\]"):
        search(stream(), data(), Options(BF16), tolerance=2e-3).plot(tmp_path / "frontier.svg")


# bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error_type", "says"),
    [
        ({"tolerance": 0}, PolicyError, "no relative error"),
        ({"tolerance": 2.0}, PolicyError, "no relative error"),
        ({"tolerance": "small"}, PolicyError, "no relative error"),
        ({"tolerance": 1e-3, "accuracy": "autocast"}, PolicyError, "pass one of them"),
        ({"accuracy": "apex"}, PolicyError, "'autocast' is"),
        ({"tolerance": 1e-3, "calibration": None}, AccuracyError, "is measured on data: pass calibration=batches"),
        ({"accuracy": "autocast", "calibration": None}, AccuracyError, "is measured on data: pass calibration=batches"),
        ({"tolerance": 1e-9}, AccuracyError, "below what fp32 itself reproduces"),
        ({"tolerance": 1e-5, "overrides": {"module:0": "low"}}, AccuracyError, "not reachable: the best of the plans tried"),
    ],
)
def test_targets_that_make_no_sense(options: dict[str, Any], error_type: type[Exception], says: str) -> None:
    with pytest.raises(error_type, match=says):
        amprewrite.rewrite(stream(2), **{"dtype": "bf16", "calibration": data(2), **options})


def test_a_given_plan_leaves_nothing_to_choose() -> None:
    model, batches = stream(2), data(1)
    plan = amprewrite.plan(model, (batches[0],), dtype="bf16")
    with pytest.raises(PolicyError, match="leaves nothing for tolerance= or accuracy= to choose"):
        amprewrite.rewrite(model, plan=plan, tolerance=1e-3, calibration=batches)


def test_nan_in_fp32_cannot_be_compared() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).log()  # type: ignore[no-any-return]

    with pytest.raises(CalibrationError, match="gives NaN in fp32 for batch 0"):
        amprewrite.rewrite(Broken(), dtype="bf16", tolerance=1e-3, calibration=data(1))
