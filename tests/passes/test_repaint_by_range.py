"""Values that do not fit fp16: who is kept high, with what evidence, and who is left alone."""

from __future__ import annotations

import math

import pytest
import torch
from chains import Case, chain, letters

import amprewrite
from amprewrite.graphs.fx.read.number_facts import largest
from amprewrite.ir.evidence.ranges import Calibration, RegionRanges, ValueRange, fingerprint
from amprewrite.passes.repaint.repaint_by_range import RepaintByRange
from amprewrite.tables.vocabulary import Colour, Reason


def seen(largest: float, smallest: float = 1.0) -> ValueRange:
    """A value spread evenly over the octaves between two magnitudes."""
    steps = torch.logspace(torch.tensor(smallest).log2().item(), torch.tensor(largest).log2().item(), 4096, base=2)
    return ValueRange.of(steps.clamp(max=largest))


def with_ranges(text: str, low: str = "fp16", lists: str = "default", **values: ValueRange) -> Case:
    """The case of a text, decided with these ranges; all other values are ordinary."""
    case = chain(text, lists, low)
    ranges = {node.name: ValueRange.of(torch.randn(4096)) for node in case.graph if node.carries_fp32} | values
    case.know(calibration=Calibration("Net", "", 1, (RegionRanges(fingerprint(case.graph), "graph", ranges),)))
    case.decide()
    return case


TINY = seen(1.0, 1e-9)


@pytest.mark.parametrize(
    ("text", "values", "colours"),
    [
        pytest.param("matmul relu matmul", {}, "L L L", id="ordinary values change nothing"),
        pytest.param("matmul relu matmul", {"matmul": seen(1e5)}, "H H L", id="the maker is high, and who reads it"),
        pytest.param("matmul matmul matmul", {"matmul": seen(1e5)}, "H H L", id="an allowed op that reads it is high too"),
        pytest.param("matmul relu matmul", {"relu": seen(3e4)}, "L H H", id="within a factor of 4 of the end is too near"),
        pytest.param("matmul relu matmul", {"relu": seen(1e4)}, "L L L", id="beyond that factor is far enough"),
        pytest.param("matmul relu matmul", {"relu": seen(1e-5, 1e-7)}, "L H H", id="all below the normal range"),
        pytest.param("matmul relu mul(relu,k) add(mul,x)", {"relu": seen(1e-5, 1e-7)}, "L L H H", id="unless it drowns in a sum"),
        pytest.param("matmul sigmoid log", {"sigmoid": seen(1.0, 1e-9)}, "L H H", id="what log reads must not be flushed"),
        pytest.param("matmul gelu log", {"gelu": seen(1.0, 1e-2)}, "L L H", id="what log reads is not flushed"),
        pytest.param("matmul sigmoid relu log", {"sigmoid": TINY, "relu": TINY}, "L H H H", id="nor before clear ops"),
        pytest.param("matmul softmax matmul", {"softmax": seen(1.0, 1e-9)}, "L L L", id="small values harm no matmul"),
    ],
)  # fmt: skip
def test_who_is_kept_high(text: str, values: dict[str, ValueRange], colours: str) -> None:
    assert letters(with_ranges(text, **values)) == colours


def test_the_reason_names_value_size_limit_and_probability() -> None:
    case = with_ranges("matmul relu matmul", matmul=seen(1e5))
    paint = case.paints["matmul"]
    assert paint.reason is Reason.OUT_OF_RANGE
    assert paint.detail == "matmul reaches 1e+05, fp16 ends at 65504: P(overflow) is 1 a pass"
    assert case.paints["relu"].detail.startswith("its input matmul reaches 1e+05")


@pytest.mark.parametrize("low", ["fp16", "bf16"])
@pytest.mark.parametrize(("difference", "colours"), [(1.0, "H H H L"), (100.0, "L L L L")])
def test_a_difference_far_smaller_than_its_operands_is_not_made_of_low_values(low: str, difference: float, colours: str) -> None:
    values = {"matmul": seen(1000.0), "view": seen(1000.0), "sub": seen(difference)}
    case = with_ranges("matmul view sub(view,matmul) matmul", low, **values)
    assert letters(case) == colours
    if colours[0] == "H":
        assert case.paints["matmul"].reason is Reason.CANCELS
        assert case.paints["sub"].detail == "sub stays within 1, view reaches 1e+03"


def test_bf16_has_the_range_of_fp32() -> None:
    assert letters(with_ranges("matmul relu matmul", low="bf16", matmul=seen(1e30))) == "L L L"
    beyond = with_ranges("matmul relu matmul", low="bf16", matmul=seen(3.4e38)).paints["matmul"]  # bf16 would round it to infinity
    assert beyond.colour is Colour.HIGH and beyond.detail.startswith("matmul reaches 3.4e+38, bf16 ends at 3.38953e+38")


def test_masks_saturate_by_design() -> None:
    case = with_ranges("matmul masked_fill^ softmax matmul", masked_fill=seen(3e38))
    assert letters(case) == letters(with_ranges("matmul masked_fill^ softmax matmul"))


@pytest.mark.parametrize("lists", ["default", "tf", "autocast", "o3"])
def test_every_list_respects_ranges(lists: str) -> None:
    case = with_ranges("matmul relu matmul", lists=lists, matmul=seen(1e5))
    assert case.paints["matmul"].colour is case.paints["relu"].colour is Colour.HIGH


def test_an_override_stands_and_a_note_says_what_it_risks() -> None:
    case = chain("matmul relu matmul", "default", "fp16", overrides={"node:matmul": "low"})
    ranges = {"matmul": seen(1e5)}
    case.know(calibration=Calibration("Net", "", 1, (RegionRanges(fingerprint(case.graph), "graph", ranges),)))
    case.decide()
    assert case.paints["matmul"].colour is Colour.LOW
    assert "matmul runs low because 'node:matmul' asks for it, though matmul reaches 1e+05" in case.decisions.notes[0]


def test_a_weight_beyond_the_range_needs_no_calibration() -> None:
    case = chain("matmul(x,w) relu matmul", "default", "fp16")
    case.know(magnitudes={"w": 1e5})
    case.decide()
    assert letters(case) == "H L L"
    assert case.paints["matmul"].reason is Reason.CONSTANT
    assert case.paints["matmul"].detail == "its input w holds 1e+05, fp16 ends at 65504"


def test_a_graph_that_calibration_never_ran_says_so() -> None:
    case = chain("matmul relu", "default", "fp16")
    case.know(calibration=Calibration("Net", "", 1, ()))
    case.decide()
    assert case.decisions.notes == ["calibration never ran this graph: no ranges are known here"]


def test_nothing_is_made_low_and_twice_is_once() -> None:
    case = with_ranges("exp matmul relu log matmul", matmul=seen(1e5))
    before = dict(case.paints)
    case.run(RepaintByRange())
    assert case.paints == before


class Masked(torch.nn.Module):
    """Attention of a text tower: its causal mask of -inf is a buffer."""

    def __init__(self, kind: str, width: int = 64, tokens: int = 1024) -> None:
        super().__init__()
        self.kind = kind
        self.attention, self.qkv = torch.nn.MultiheadAttention(width, 4, batch_first=True), torch.nn.Linear(width, 3 * width)
        self.register_buffer("mask", torch.full((tokens, tokens), float("-inf")).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "attention module":
            return self.attention(x, x, x, need_weights=False, attn_mask=self.mask)[0]
        query, key, value = self.qkv(x).chunk(3, -1)
        return (query @ key.mT + self.mask).softmax(-1) @ value


@pytest.mark.parametrize("kind", ["attention module", "written out"])
def test_an_infinite_mask_in_a_buffer_fits_fp16(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Masked(kind), torch.randn(1, 1024, 64)
    amp = amprewrite.rewrite(model, dtype="fp16", example_inputs=(x,))
    assert not [node.name for node in amp.plan.nodes if node.flops and node.colour is Colour.HIGH]
    wanted = model(x)
    assert (amp(x) - wanted).norm() < 2e-3 * wanted.norm()


@pytest.mark.parametrize(("values", "size"), [((-2.0, -math.inf), 2.0), ((math.inf, math.nan), 0.0), ((1e5, math.inf), 1e5)])
def test_the_size_of_a_weight_is_that_of_its_finite_values(values: tuple[float, ...], size: float) -> None:
    assert largest([torch.tensor([1.0]), torch.tensor(values)]) == [1.0, pytest.approx(size)]
