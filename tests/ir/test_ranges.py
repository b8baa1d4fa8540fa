"""What is seen of values: exact counts, merging, files, and the fit to their tails."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amprewrite.ir.evidence.ranges import Calibration, RegionRanges, ValueRange
from amprewrite.tables.errors import CalibrationError
from amprewrite.tables.formats import BF16, FP16

FLOATS = st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=40)


def example(**values: ValueRange) -> Calibration:
    return Calibration("Net", "abc", 2, (RegionRanges("graph", "graph0", values, {"x": ValueRange.of(torch.ones(2))}),))


@settings(deadline=None)
@given(FLOATS)
def test_counts_are_exact(numbers: list[float]) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float32)
    found = ValueRange.of(tensor)
    finite = [x for x in tensor.tolist() if math.isfinite(x)]
    sizes = [abs(x) for x in finite if x]
    assert (found.count, found.zeros) == (len(numbers), len(finite) - len(sizes))
    assert (found.nan, found.infinite) == (sum(map(math.isnan, numbers)), sum(map(math.isinf, tensor.tolist())))
    assert found.nonzero == len(sizes)
    assert found.amax == max(map(abs, finite), default=0.0)
    assert found.smallest == min(sizes, default=math.inf)
    normal = [x for x in sizes if x >= 2.0**-126]
    for e, n in found.exponents:
        if e >= -126:
            assert n == sum(2.0**e <= x < 2.0 ** (e + 1) for x in normal)


@settings(deadline=None)
@given(FLOATS)
def test_limits_are_those_of_the_whole_range(numbers: list[float]) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float32)
    whole, brief = ValueRange.of(tensor), ValueRange.limits(tensor, smallest=True)
    assert (brief.count, brief.amax, brief.smallest, brief.exponents) == (whole.count, whole.amax, whole.smallest, ())
    assert ValueRange.limits(tensor, smallest=False).smallest == math.inf


@settings(deadline=None)
@given(FLOATS, FLOATS)
def test_merging_is_seeing_both(a: list[float], b: list[float]) -> None:
    left, right = torch.tensor(a, dtype=torch.float32), torch.tensor(b, dtype=torch.float32)
    both = ValueRange.of(left) | ValueRange.of(right)
    whole = ValueRange.of(torch.cat([left, right]))
    assert both.batches == 2
    assert (both.count, both.zeros, both.nan, both.infinite, both.least, both.greatest, both.smallest, both.exponents) == (
        whole.count, whole.zeros, whole.nan, whole.infinite, whole.least, whole.greatest, whole.smallest, whole.exponents
    )  # fmt: skip


def test_large_tensors_are_seen_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, 3)
    whole = ValueRange.of(tensor)
    monkeypatch.setattr("amprewrite.ir.evidence.ranges.CHUNK", 7)
    assert ValueRange.of(tensor) == whole


def test_low_tensors_and_strides_are_read_as_they_are() -> None:
    tensor = torch.randn(8, 6)
    assert ValueRange.of(tensor.t()) == ValueRange.of(tensor.t().contiguous())
    assert ValueRange.of(tensor.bfloat16()).amax == tensor.bfloat16().abs().max().item()


@pytest.mark.parametrize(
    ("scale", "risky"), [(1.0, False), (100.0, False), (1000.0, False), (1e4, True), (6e4, True)], ids=lambda x: str(x)
)
def test_the_chance_of_a_normal_value_to_overflow(scale: float, risky: bool) -> None:
    torch.manual_seed(0)
    found = ValueRange.of(torch.randn(20_000) * scale)
    assert (found.overflow_in_pass(FP16) > 1e-3) is risky
    assert found.overflow(BF16) < 1e-30


def test_a_heavy_tail_is_foreseen_before_it_overflows() -> None:
    """Pareto with index 1: of 10,000 values none is beyond 65504, of ten times as many some are."""
    torch.manual_seed(1)
    values = 1 / torch.rand(10_000)
    few = ValueRange.of(values[values < 3e4])
    assert 1 / 65536 / 4 < few.overflow(FP16) < 4 / 65536
    assert few.overflow_in_pass(FP16) > 1e-2


def test_the_share_seen_is_the_probability() -> None:
    assert ValueRange.of(torch.tensor([1e5, 1.0, 2.0, 4.0])).overflow(FP16) == 0.25
    tiny = ValueRange.of(torch.tensor([1e-9, 1.0, 1.0, 0.0]))
    assert tiny.underflow(FP16) == pytest.approx(1 / 3)
    assert ValueRange.of(torch.tensor([1e-6, 1.0])).subnormal(FP16) == 0.5


def test_few_ordinary_values_are_no_risk() -> None:
    for values in ([0.2, -0.1, 0.03], [1.0], [13.0, 0.004], [0.0, 0.0]):
        assert ValueRange.of(torch.tensor(values)).overflow_in_pass(FP16) < 1e-3


def test_files_give_back_what_was_saved(tmp_path: Path) -> None:
    made = example(a=ValueRange.of(torch.randn(100)), b=ValueRange.of(torch.tensor([math.nan, math.inf, 0.0])))
    made.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == made


def test_merging_keeps_what_only_one_side_saw() -> None:
    a, b = example(a=ValueRange.of(torch.ones(3))), example(b=ValueRange.of(torch.ones(4)), a=ValueRange.of(torch.ones(2)))
    both = a.merge(b)
    assert both.batches == 4
    assert {name: seen.count for name, seen in both.regions[0].values.items()} == {"a": 5, "b": 4}
    assert "4 batches" in str(both)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "has no 'regions'"),
        ('{"regions": [], "parameters": "", "version": 99}', "version 99"),
        ('{"regions": [{}], "parameters": "", "version": 1}', "damaged"),
    ],
)
def test_other_files_are_refused(text: str, says: str) -> None:
    with pytest.raises(CalibrationError, match=says):
        Calibration.from_json(text)


def test_a_missing_file_and_another_model_are_told() -> None:
    with pytest.raises(CalibrationError, match="no calibration at"):
        Calibration.load("/nowhere/c.json")
    with pytest.raises(CalibrationError, match="different models"):
        example() | Calibration("Other", "def", 1, ())
    with pytest.raises(CalibrationError, match="made with a Net of other parameters than this Linear has"):
        example().check(torch.nn.Linear(2, 2))
