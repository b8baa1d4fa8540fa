"""Which regions are padded: by cost on a device that gains from it, by request anywhere, and nothing twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx
from chains import Case
from pad_help import OddCNN, OddMLP, TinyGPT, ids, noise
from torch import nn

import amprewrite
from amprewrite.ir.policies.policy import Policy, parse_pad
from amprewrite.passes.driver import read_problem
from amprewrite.passes.plan.plan_pads import PlanPads
from amprewrite.planner.padding.pad_cost import PadCost, Product, efficiency
from amprewrite.planner.padding.regions import Regions
from amprewrite.planner.padding.rule import Axes
from amprewrite.tables.devices import H100
from amprewrite.tables.formats import BF16

Capture = Callable[..., torch.fx.GraphModule]


def planned(module: torch.fx.GraphModule, pad: object = "auto", device: str = "cuda", training: bool = False) -> Case:
    captured = read_problem(module, Policy(BF16), training=training, pad=parse_pad(pad, True))
    return Case(captured.problem).know(device=device).decide()


def test_auto_pads_large_products_where_the_device_gains(capture: Capture) -> None:
    case = planned(capture(OddMLP(501, 501), noise(4096, 501)), training=True)
    (first, *rest) = case.decisions.pads.regions
    assert case.decisions.pads and first.padded == 504 and first.why == "it pays" and (first.gain or 0) > 0
    assert not any(region.declined for region in rest)
    assert "predicted gain" in str(first)


def test_auto_leaves_small_products_and_says_what_they_would_save(capture: Capture) -> None:
    case = planned(capture(OddMLP(), noise(8, 101)))
    whys = {region.size: region.why for region in case.decisions.pads.regions}
    assert not case.decisions.pads
    assert "us a step, less than its pads and bytes cost" in whys[101] and whys[10] == "it would grow by 60 %"


def test_auto_declines_what_would_grow_too_much(capture: Capture) -> None:
    case = planned(capture(lambda x, w: x @ w, noise(4096, 512), noise(512, 9)))
    assert [region.why for region in case.decisions.pads.regions] == ["it would grow by 78 %"]


def test_always_pads_on_any_device(capture: Capture) -> None:
    for device in ("cpu", "cuda"):
        assert planned(capture(OddCNN(), noise(2, 3, 16, 16)), "always", device).decisions.pads


def test_no_axis_is_followed_where_the_cut_padded_nothing(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[object] = []
    leaves, cut = Axes.leaves, Regions.cut
    monkeypatch.setattr(Axes, "leaves", lambda self, axes: followed.append(axes) or leaves(self, axes))
    monkeypatch.setattr(Regions, "cut", lambda self, *given: (cut(self, *given), followed.clear()))
    case = planned(capture(OddMLP(), noise(8, 101)))
    assert case.decisions.pads.regions and not case.decisions.pads and not followed


def test_where_the_device_gains_nothing_reasons_are_found_when_a_plan_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    build = Regions.build
    monkeypatch.setattr(Regions, "build", lambda self: built.append(self) or build(self))
    amp = amprewrite.rewrite(OddMLP(), dtype="bf16")
    amp(noise(8, 101))
    assert built == []
    (region,) = amp.plan.regions
    assert built and not region.pads
    assert any("gains nothing from aligned ones" in each.why for each in region.pads.regions)


def test_never_plans_nothing(capture: Capture) -> None:
    assert not planned(capture(OddMLP(), noise(8, 101)), "never").decisions.pads.regions


def test_deciding_edits_nothing_and_twice_is_once(capture: Capture) -> None:
    module = capture(TinyGPT(), ids(), ids())
    before = str(module.graph)
    case = planned(module, "always")
    first = case.decisions.pads
    case.run(PlanPads())
    assert case.decisions.pads == first and str(module.graph) == before


def test_every_padded_dim_of_a_region_has_its_size(capture: Capture) -> None:
    case = planned(capture(TinyGPT(), ids(), ids()), "always")
    for padded in case.decisions.pads.values:
        for _, factors in padded.layout:
            assert any((region.size, region.padded) in factors or region.padded > region.size for region in case.decisions.pads.regions)
    assert {(r.size, r.padded) for r in case.decisions.pads.regions} == {(100, 104), (25, 32), (301, 304), (509, 512)}


@pytest.mark.parametrize("size, share", [(8, 1.0), (4, 0.75), (6, 0.55), (7, 0.4), (50257, 0.4), (50264, 1.0)])
def test_efficiency_follows_the_bytes_of_a_row(size: int, share: float) -> None:
    assert efficiency(size, 2) == share


def test_a_product_bound_by_bytes_gains_nothing() -> None:
    cost = PadCost(H100, BF16, training=True)
    assert cost.gain(Product(1, 1001, 1001), Product(1, 1008, 1008)) == 0
    assert cost.gain(Product(8192, 1001, 1001), Product(8192, 1008, 1008)) > 0


def test_measured_times_are_taken_over_the_model() -> None:
    cost = PadCost(H100, BF16, training=False, measure=lambda a, b: (3e-4, 1e-4))
    assert cost.gain(Product(1, 3, 3), Product(1, 8, 8)) == pytest.approx(2e-4)


def test_axes_split_and_join() -> None:
    axes = Axes()
    whole, heads, head, other = axes.new(100), axes.new(4), axes.new(25), axes.new(100)
    assert axes.unify([whole], [heads, head]) and axes.unify([other], [whole])
    assert axes.leaves([other]) == (axes.find(heads), axes.find(head))
    assert not axes.unify([whole], [axes.new(5), axes.new(20)])
    symbol, same, another = axes.new("s0"), axes.new("s0"), axes.new("s1")
    assert axes.unify([symbol], [same]) and not axes.unify([symbol], [another]) and not axes.unify([symbol], [whole])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_ops_on_numbers_that_name_a_dim(dtype):
    class Numbers(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(5, 3)

        def forward(self, x):
            v = self.a(x).mean()
            return v.sum(0), v.softmax(0), v.cumsum(-1), v.amax(0), v.transpose(0, -1), v.unsqueeze(0), v.expand(3)

    model, x = Numbers(), torch.randn(2, 5)
    amp = amprewrite.rewrite(model, dtype=dtype, strict=True)
    for got, want in zip(amp(x), model(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.01)
