"""Measure the relative error between two runs of ONNX models, and warn if a result is not finite."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from amprewrite.graphs.onnx.run.samples import has_numbers
from amprewrite.tables.errors import AmpRewriteWarning
from amprewrite.tables.formats import Format


def relative_error(wanted: Sequence[Sequence[Any]], got: Sequence[Sequence[Any]]) -> float:
    """Return the relative L2 error of all floating outputs of `got` together; infinity if `got` is not finite where `wanted` is.

    `wanted` and `got` hold one list of outputs for each run. If all wanted numbers are zero, the error is absolute. Infinity is also the
    result if the outputs differ in number or shape.
    """
    if _shapes(wanted) != _shapes(got):
        return float("inf")
    error = size = 0.0
    for want, have in zip(_arrays(wanted), _arrays(got), strict=True):
        if want.dtype.kind != "f":
            continue
        left, right = want.astype(np.float64), have.astype(np.float64)
        same = np.isfinite(left)
        if not np.isfinite(right[same]).all():
            return float("inf")
        error += float(((left - right)[same] ** 2).sum())
        size += float((left[same] ** 2).sum())
    return (error / size) ** 0.5 if size else error**0.5


def resized(wanted: Sequence[Sequence[Any]], got: Sequence[Sequence[Any]]) -> set[int]:
    """Return the positions of the outputs that differ in shape in any run.

    Rounding may change the shape of an output if a condition on values selects its elements, as in a detector.
    `wanted` and `got` hold one list of outputs for each run, of the same number.
    """
    pairs = zip(wanted, got, strict=True)
    return {place for wants, gots in pairs for place, (a, b) in enumerate(zip(wants, gots, strict=True)) if _shapes(a) != _shapes(b)}


def _shapes(results: Any) -> list[tuple[int, ...]]:
    return [array.shape for array in _arrays(results)]


def is_measurable(outputs: Sequence[Sequence[Any]]) -> bool:
    """True if any of the results holds a finite floating number. Without such a number an error has no meaning."""
    return any(array.dtype.kind == "f" and has_numbers(array) for array in _arrays(outputs))


def _arrays(results: Any) -> Iterator[np.ndarray]:
    """Yield the arrays of all results: several for a sequence, one for each key of a map, none for an empty optional."""
    if isinstance(results, np.ndarray | np.generic):
        yield np.asarray(results)
    elif isinstance(results, Mapping):
        for each in results.values():
            yield from _arrays(each)
    elif isinstance(results, list | tuple):
        for each in results:
            yield from _arrays(each)
    elif isinstance(results, int | float):
        yield np.asarray(results)


def tell_of_overflow(name: str, low: Format) -> str:
    """Warn that results of a rewritten model are not finite where those of the original are. Returns the text of the warning."""
    said = (
        f"{name} gives finite numbers on the samples, and the rewritten one does not in {low.name}; keep ops fp32 by overrides=, or take "
        "dtype='bf16': a sample run shows no ranges in bodies of If, Loop and Scan, and what is asked for goes before ranges"
    )
    warnings.warn(said, AmpRewriteWarning, stacklevel=2)
    return said
