"""Round constants of an ONNX model to a low format, and tell what a low copy would lose.

Rounding is to nearest even. Signs, zeros, infinities and NaN are kept, and nothing within the range is clamped. Finite masks become the
format's lowest number. Before a softmax they become less than half of that number: adding a score or a second mask must not give an
infinity, because the softmax of a fully blocked row would then be NaN. Any other constant that would overflow, or lose its value to
underflow, keeps its op in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from amprewrite.ir.evidence.constants import Loss
from amprewrite.ir.evidence.range_rules import EXTREME, MASK
from amprewrite.tables.formats import LOW_FORMATS, Format

NUMPY = {row.name: np.dtype(getattr(ml_dtypes, row.library_name, row.library_name)) for row in LOW_FORMATS}
LOSS = 4
"""A constant loses too many bits to underflow if the relative error of one of its slices exceeds this many times the format's eps."""

BLOCKED = 15 / 32
"""The number that blocks a score is this share of the format's lowest number.

In fp16 it is -30704. Two such numbers and a score of -4000 have a finite sum. Adding one such number to a score below 8 rounds away the
bits of the score. So the softmax of a fully blocked row is as uniform as in fp32.
"""


@dataclass(frozen=True)
class Facts:
    """Facts about one constant in one low format. `overflow` and `flushed` count the elements that overflow or become zero."""

    elements: int
    overflow: int
    mask: bool
    """True if values overflow, and each of these is so large that it can only be a mask."""
    flushed: int
    worst: float
    """Largest relative L2 error of the whole constant or of a slice along its first or last axis."""
    least: float
    most: float
    largest: float
    """Largest finite magnitude."""
    smallest: float
    """Smallest magnitude that is not zero."""
    error: float
    """Largest absolute error of a value that does not overflow."""


def rounded(values: np.ndarray, fmt: Format, masks_scores: bool = False) -> np.ndarray:
    """Round a constant to nearest even in `fmt`. Finite numbers beyond the range become ±max.

    If the constant only masks attention scores (`masks_scores`), they become ±max * BLOCKED, so that sums with scores stay finite.
    """
    with np.errstate(over="ignore", under="ignore"):
        low = values.astype(NUMPY[fmt.name])
    over = ~np.isfinite(low.astype(np.float32)) & np.isfinite(values)
    if over.any():
        end = np.float32(fmt.max * BLOCKED if masks_scores else fmt.max)
        low = np.where(over, np.copysign(end, values).astype(low.dtype), low)
    return low


def facts(values: np.ndarray, fmt: Format) -> Facts:
    """Return statistics of a constant that is rounded to a low format: how many values overflow or become 0, and the errors."""
    if not values.size:
        return Facts(0, 0, False, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        low = values.astype(NUMPY[fmt.name]).astype(np.float32)
        size = np.abs(values)
        over = ~np.isfinite(low) & np.isfinite(values)
        flushed = (low == 0) & (values != 0)
        error = np.where(np.isfinite(values) & ~over, low - values, 0)
    lost = size[over]
    mask = bool(over.any() and ((lost >= EXTREME) | ((values[over] < 0) & (lost >= MASK))).all())
    present = size[(size > 0) & np.isfinite(size)]
    largest = float(present.max()) if present.size else 0.0
    worst = _worst_slice(error, np.where(np.isfinite(values) & ~over, values, 0)) if _may_lose(size, fmt, largest) else 0.0
    return Facts(
        values.size, int(over.sum()), mask, int(flushed.sum()), worst, float(values.min()), float(values.max()), largest,
        float(present.min()) if present.size else 0.0, float(np.abs(error).max()),
    )  # fmt: skip


def _may_lose(size: np.ndarray, fmt: Format, largest: float) -> bool:
    """True if a low copy may lose more than a rounding: some of the magnitudes `size` are below the normal numbers of `fmt`, but not 0."""
    return bool(largest and ((size > 0) & (size < fmt.smallest_normal)).any())


def _worst_slice(error: np.ndarray, values: np.ndarray) -> float:
    """Return the largest relative L2 error of the whole constant or of a slice along its first or last axis."""
    square_error, square = error.astype(np.float64) ** 2, values.astype(np.float64) ** 2
    axes = [None] if values.ndim < 2 else [None, tuple(range(1, values.ndim)), tuple(range(values.ndim - 1))]
    worst = 0.0
    for axis in axes:
        lost, whole = np.atleast_1d(square_error.sum(axis)), np.atleast_1d(square.sum(axis))
        worst = max(worst, float(np.sqrt(np.divide(lost, whole, out=np.zeros_like(lost), where=whole > 0)).max()))
    return worst


def loss_of(name: str, found: Facts, fmt: Format, saturates: bool, masks_scores: bool = False) -> Loss | None:
    """Return the error of the constant `name` if it is stored in the low format `fmt`, as a `Loss`; None if it is only rounded.

    `found` holds the facts about the constant in `fmt`. `saturates` is True if the reader uses the constant as a mask or a bound, so that
    numbers beyond the range may be clamped. `masks_scores` is True if all readers mask attention scores with the constant.
    """
    of, kept, saturated = f"of {found.elements} values", True, False
    if found.overflow and not saturates:
        why = f"{found.overflow} {of} exceed {fmt.name}'s {fmt.max:g} (largest {found.largest:.3g})"
    elif found.worst > LOSS * fmt.eps:
        why = f"{found.flushed} {of} vanish in {fmt.name}, others lose bits (smallest {found.smallest:.3g})"
    elif found.overflow:
        end = "less than half of its lowest: a mask of scores" if masks_scores else "its lowest or highest: a mask or bound"
        why, kept, saturated = f"{found.overflow} {of} exceed {fmt.name}'s range and become {end}", False, True
    elif found.flushed:
        beside = f"negligible beside their neighbours (smallest {found.smallest:.3g}, largest {found.largest:.3g})"
        why, kept = f"{found.flushed} {of} vanish in {fmt.name}, {beside}", False
    else:
        return None
    return Loss(name, why, kept, saturated, found.overflow, found.flushed, found.error)
