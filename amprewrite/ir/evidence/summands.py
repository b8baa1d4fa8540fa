"""Find the summands of linear ops: the values that an op adds up, each with its factor. `x + 0.1 * y` has the summands x and `0.1 * y`.

This file has special code for `add`, `sub`, `rsub`, `neg`, `mul`, `div`, `lerp`, `addcmul` and `addcdiv`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SMALL = 0.25
"""A summand is small if its factor is at most SMALL times the factor of the value to which it is added.

Scaling a summand down to a quarter also scales its rounding errors down to a quarter.
"""


@dataclass(frozen=True)
class Factor:
    """The factor of a summand: a number times *schedules*, values known only at run time, such as the step sizes of a diffusion sampler.

    `schedules` holds pairs (schedule s, use). The use "" stands for the factor s, "divided by" for 1 / s, and "rest" for 1 - s.
    """

    number: float = 1.0
    schedules: frozenset[tuple[Hashable, str]] = frozenset()

    def __mul__(self, other: Factor) -> Factor:
        return Factor(self.number * other.number, self.schedules | other.schedules)

    def __add__(self, other: Factor) -> Factor:
        if self.schedules == other.schedules:
            return Factor(self.number + other.number, self.schedules)
        larger = self if self.schedules < other.schedules else other
        if larger.schedules <= self.schedules & other.schedules:
            return larger  # schedules count as small numbers, so drop the term with more of them: `1 - schedule` is about 1
        return Factor(1.0, self.schedules | other.schedules)

    def is_small(self, beside: Factor) -> bool:
        """True if a summand with this factor is small next to a value with the factor `beside`: at most SMALL times as large.

        The result is also True if this factor has a schedule that `beside` lacks. Schedules (see `Factor`) count as small numbers.
        """
        return not self.schedules <= beside.schedules or abs(self.number) <= SMALL * abs(beside.number)


Summands = Mapping[str, Factor]
"""{name of a summand: its factor} of one op. Plain numbers are left out."""


def summands(
    op: str, given: Sequence[Any], factor: Callable[[Any, str], Factor | None], name: Callable[[Any], str], scale: Any = 1.0
) -> dict[str, Factor]:
    """Return {name of a summand: its factor} for a call of `op` with the arguments `given`; {} if the call is not known to be linear.

    `factor(argument, use)` returns an argument as a `Factor`: the argument itself for the use "", its reciprocal for "divided by", and one
    minus the argument for "rest". It returns None for an argument that is no number or schedule, such as an activation. `name(argument)`
    returns the name of a tensor; "" for other arguments. `scale` multiplies the second summand: `alpha` of `add`, `value` of `addcmul`.
    """
    first, second, third = (*given[:3], None, None, None)[:3]
    one, minus = Factor(), Factor(-1.0)
    parts = list[tuple[Any, Factor | None]]()
    if op == "add" and len(given) == 2:
        parts = [(first, one), (second, factor(scale, ""))]
    elif op in ("sub", "rsub"):
        start, taken = (first, second) if op == "sub" else (second, first)
        parts = [(start, one), (taken, _product(factor(scale, ""), minus))]
    elif op == "neg":
        parts = [(first, minus)]
    elif op == "mul":
        times = factor(second, "")
        parts = [(first, times)] if times is not None else [(second, factor(first, ""))]
    elif op == "div":
        parts = [(first, factor(second, "divided by"))]
    elif op == "lerp":
        parts = [(first, factor(third, "rest")), (second, factor(third, ""))]
    elif op in ("addcmul", "addcdiv"):
        times = factor(third, "divided by" if op == "addcdiv" else "")
        if times is None and op == "addcmul":
            second, times = third, factor(second, "")
        parts = [(first, one), (second, _product(factor(scale, ""), times))]
    tensors = [(value, times) for part, times in parts if (value := name(part))]
    return joined((value, times) for value, times in tensors if times) if all(times for _, times in tensors) else {}


def joined(parts: Iterable[tuple[str, Factor]]) -> dict[str, Factor]:
    """Return {value: the sum of its factors}. `parts` holds pairs (value, factor), in which one value may occur several times."""
    found = dict[str, Factor]()
    for value, times in parts:
        found[value] = found[value] + times if value in found else times
    return found


def _product(one: Factor | None, other: Factor | None) -> Factor | None:
    return one * other if one and other else None
