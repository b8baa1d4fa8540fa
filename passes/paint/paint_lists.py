"""Choose the colour (low, high or plain) of every node whose colour is forced, or is decided by an override or an op list.

1. Forced colours first: nodes without fp32 values are plain; inputs, parameters and explicit dtypes stay fp32 (high).
2. If the policy is fp32, for example on a device that gains nothing from low precision, all ops with fp32 values are high.
3. Overrides of nodes and modules come next.
4. Then the lists: allowed ops are low, denied ops are high.

The passes after this one paint the rest. The result does not depend on the order of the nodes.
"""

from __future__ import annotations

from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.errors import PassError
from amprewrite.tables.formats import FP32, WIDE
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

YIELDS = (Reason.CONSTANT, Reason.UNEVEN)
"""Reasons for a forced fp32 that an override of a node or module may overrule. The op then runs low, with a less exact result."""


class PaintLists(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        paint_facts(problem, decisions)
        paint_lists(problem, decisions)
        check_facts(problem, decisions)


def paint_facts(problem: Problem, decisions: Decisions) -> None:
    for node in problem.graph:
        # ops without an fp32 result stay plain: if they refuse low operands, `FirstRun` casts the operands when the graph runs
        if node.name in problem.refused and node.carries_fp32:
            decisions.paint(node.name, Colour.HIGH, Reason.REFUSED, detail=problem.refused[node.name])
        elif node.pinned is not None:
            colour, reason, detail = node.pinned
            decisions.paint(node.name, colour, reason, detail=detail)


def check_facts(problem: Problem, decisions: Decisions) -> None:
    """Raise PassError if a node without an fp32 value was painted low or high instead of plain."""
    for node in problem.graph:
        if not node.carries_fp32 and decisions.paints[node.name].colour is not Colour.PLAIN:
            raise PassError(f"{node.name} carries no fp32 value and was painted {decisions.paints[node.name].colour}")


def paint_lists(problem: Problem, decisions: Decisions) -> None:
    for node in problem.graph:
        if node.role != "op" or not node.carries_fp32 or node.name in problem.refused:
            continue
        if problem.policy.low is FP32:  # give only this reason: a reason about a low format would mislead
            decisions.paint(node.name, Colour.HIGH, Reason.FP32_POLICY)
            continue
        asked = problem.policy.asked_for(node.name, node.module)
        if asked is not None and asked.word == WIDE:  # "wide" means bf16 operands and an fp32 result, so it applies to matrix products only
            asked = asked if node.name in problem.matrix_products else None
        movable = node.name not in decisions.paints or decisions.paints[node.name].reason in YIELDS
        if asked is not None and (asked.word != "low" or movable):
            decisions.paint(node.name, Colour.LOW if asked.word == "low" else Colour.HIGH, Reason.ASKED, detail=asked.key)
        elif node.name in decisions.paints:
            if asked is not None and asked.scope == "node" and asked.pattern == node.name:
                decisions.note(f"overrides[{asked.key!r}] does nothing here: {node.name} stays fp32 for the reason in its line")
        elif node.kind is OpKind.ALLOW:
            decisions.paint(node.name, Colour.LOW, Reason.ON_ALLOWLIST)
        elif node.kind is OpKind.DENY:
            decisions.paint(node.name, Colour.HIGH, Reason.ON_DENYLIST)
