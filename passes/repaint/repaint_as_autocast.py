"""Keep a value in fp32 if torch.autocast keeps it in fp32, unless rounding it is free.

torch.autocast rounds at products. It keeps in fp32 the results of other ops on inputs and weights, and of ops on its fp32 list. Code may
rely on that: `(x - mean) / std` of large values, `1 - sigmoid(y.float())`, differences of times, thresholds. So an unknown op is safe by
default.

Rounding the result of an op is *free* if

1. it has no offset of unknown size (`ir/held_wide.py`): products or norms made it, or it is learnt; and
2. no reader magnifies a rounding. A difference does, a batch norm does, and an op does that passes the value on to such a reader.
   Logarithms, shares, steps, choices of places, denied and unlisted ops, kinks in training, and results of the graph do unless products
   have already rounded the value as far as the low format does. Norms and averages do not. Products round their operands anyway, and so do
   casts to a low format.

A value that products alone read, directly or through views, is free in any case, because they round it. An op runs low only if rounding its
operands is free, too. A difference from the mean of each sample, `x - x.mean(-1)`, counts as a norm. Pins and overrides stand. Ties
share a colour.

Judged by: tests/passes/test_repaint_unrounded.py, test_kinks.py, test_squared_distances.py and test_error_laws.py, and by
tests/runtime/test_products_told.py.

By name it knows `getitem`, which picks the places among the results of an op.
"""

from __future__ import annotations

from amprewrite.ir.decisions import Decisions
from amprewrite.ir.held_wide import AVERAGES, AWAY, CONVERTS, FACTORS, LOGS, NORMS, data_of, held, is_product, rounds
from amprewrite.ir.op_graph import OpNode
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.problem import Problem
from amprewrite.passes.paint.paint_ties import paint_ties
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import Held, OpKind, Reason

STEPS, KINKS, BATCH_NORMS = ops_with(Trait.HAS_STEPS), ops_with(Trait.HAS_KINKS), ops_with(Trait.TAKES_BATCH_MEAN)
LEVEL = AVERAGES | NORMS
WHOLE = LOGS | ops_with(Trait.SHARES_OUT)


class RepaintAsAutocast(Pass[Problem, Decisions]):
    name = "repaint-as-autocast"

    def call(self, problem: Problem, decisions: Decisions) -> bool:
        before = dict(decisions.paints)
        found = Roundings(problem)
        for node in problem.graph:
            if node.role == "op" and found.held[node.name] < Held.LOW and not is_product(node) and not found.is_free(node):
                reader = found.magnifies.get(node.name, "")
                decisions.keep_high(problem, node.name, Reason.MAGNIFIED if reader else Reason.UNROUNDED, because_of=reader)
        if decisions.paints != before:
            paint_ties(problem, decisions)
        return decisions.paints != before


class Roundings:
    """Effect of rounding each value of a graph."""

    def __init__(self, problem: Problem) -> None:
        self.graph, self.held, self.trained = problem.graph, held(problem), problem.trained
        self.magnifies: dict[str, str] = dict.fromkeys(problem.needs_bits, problem.name)
        """By value: a reader that would magnify its rounding."""
        self.rounded_anyway: set[str] = set()
        """Values that products alone read, directly or through views."""
        for node in reversed(list(self.graph)):  # readers first
            readers = [each for each in self.graph.readers(node.name) if any(node.name == operand.value for operand in data_of(each))]
            harmed = next((each.name for each in readers if self._harms(each, node.name) or self._hands_harm_on(each, node.name)), "")
            if harmed:
                self.magnifies.setdefault(node.name, harmed)
            anyway = all(rounds(each) or (self._moves(each) and each.name in self.rounded_anyway) for each in readers)
            if readers and anyway and node.name not in problem.needs_bits:
                self.rounded_anyway.add(node.name)

    def is_free(self, node: OpNode) -> bool:
        """True if an op may round its result and its operands."""
        anyway = node.name in self.rounded_anyway
        if not anyway and (self.held[node.name] is Held.EXACT or node.name in self.magnifies):
            return False
        given = [each.value for each in data_of(node) if not each.scalar]
        reads = all(self.held[each] > Held.EXACT and not self._harms(node, each) for each in given)
        return reads or (anyway and self._moves(node))

    def _moves(self, node: OpNode) -> bool:
        """True if rounding before an op equals rounding after it: it moves, selects or scales the elements of one value."""
        alone = sum(not each.scalar for each in node.operands) == 1
        return alone and (node.kind is OpKind.CLEAR or node.op in FACTORS) and not self._turns(node)

    def _turns(self, node: OpNode) -> bool:
        """True if rounding an operand makes the result jump, selects other places, or sends gradients to other elements."""
        jumps = node.op in STEPS or (node.op in CONVERTS and node.dtype.startswith(("int", "uint", "bool")))
        places = any(reader.op == "getitem" and not reader.carries_fp32 for reader in self.graph.readers(node.name))
        return jumps or places or (node.op in KINKS and node.name in self.trained)

    def _harms(self, node: OpNode, value: str) -> bool:
        """True if an op would itself magnify a rounding of `value`, which it reads."""
        exact = self.held[value]
        if rounds(node) or exact is Held.LOW:
            return False
        if node.op in LEVEL or self._is_norm(node):
            return exact is Held.EXACT or node.op in BATCH_NORMS
        if node.op in AWAY:
            return True
        whole = node.role == "output" or node.kind in (OpKind.DENY, None) or node.op in WHOLE
        return exact < Held.ROUNDED and (whole or self._turns(node))

    def _is_norm(self, node: OpNode) -> bool:
        """True if an op subtracts from a value its mean over the dims of each sample, as layer, group and instance norms do.

        What samples have in common may dwarf their differences, as for a batch norm. So it is for averages along any dim but the last.
        """
        given = [operand.value for operand in node.operands]
        for mean in (self.graph[each] for each in given if node.op in AWAY and self.graph[each].op in AVERAGES):
            of = next((operand.value for operand in mean.operands if operand.value in given), "")
            if of and len(mean.shape) == len(node.shape) and mean.shape[0] == node.shape[0]:
                return mean.shape[-1] == 1 or self.graph.seen(of).op not in AVERAGES
        return False

    def _hands_harm_on(self, node: OpNode, value: str) -> bool:
        """True if an op passes a rounding of `value` on to a reader that magnifies it, or to a result that torch.autocast holds exactly."""
        if rounds(node) or node.kind in (OpKind.DENY, None) or not node.carries_fp32 or node.op in WHOLE | NORMS:
            return False
        kept = self.held[node.name] is Held.EXACT is not self.held[value]
        return node.name in self.magnifies or (kept and node.op not in AVERAGES)


__all__ = ["RepaintAsAutocast", "Roundings"]
