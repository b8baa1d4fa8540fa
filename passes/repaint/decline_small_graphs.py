"""Leave a graph in fp32 if its casts cost more than its low-precision ops save, and the user named no format.

1. The pass applies only with `dtype=None`, op lists with the rule "cost", no overrides, and the eager backend, where a cast is a kernel.
2. It does not apply if another graph of the model runs some of the same ops low, because both graphs must give the same numbers.
3. Compare the price of the current colours with the price of all ops in fp32. If fp32 is cheaper by more than MARGIN, paint all ops high.
"""

from __future__ import annotations

from collections.abc import Mapping

from amprewrite.ir.cost import TICK, Prices
from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.vocabulary import Colour, Reason

MARGIN = 0.05
"""Relative difference in price below which the cost model cannot tell two plans apart."""


class DeclineSmallGraphs(Pass[Problem, Decisions]):
    needs = ("policy.may_decline",)

    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        colours = decisions.colours
        if Colour.LOW in problem.agreed.of(problem.graph).values():
            return
        fp32 = all_high(problem, colours)
        if fp32 == colours:
            return
        prices = Prices(problem.graph, problem.costs)
        planned, plain = prices.of(colours).total, prices.of(fp32).total
        if planned <= plain * (1 + MARGIN):
            return
        told = f"low precision would take {1e6 * planned * TICK:.4g} µs a pass instead of {1e6 * plain * TICK:.4g} µs"
        for name, colour in fp32.items():
            if colour is not colours[name]:
                decisions.paint(name, colour, Reason.DEVICE, detail=told)
        decisions.note(f"stays fp32: {told}, casts included; pass dtype={problem.policy.low.name!r} to rewrite anyway")


def all_high(problem: Problem, colours: Mapping[str, Colour]) -> dict[str, Colour]:
    """Return `colours` with all ops in fp32 (high) except ops without fp32 values and ops whose format is forced."""
    fixed = {node.name for node in problem.graph if node.role != "op" or node.pinned is not None}
    return {name: colour if name in fixed or colour is Colour.PLAIN else Colour.HIGH for name, colour in colours.items()}
