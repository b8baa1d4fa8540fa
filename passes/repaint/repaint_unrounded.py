"""Keep high what has full precision yet, where a rounding of it would be magnified.

torch.autocast rounds at the first product. Until then inputs, buffers and weights are as exact as fp32 is, and code may rely on that:
`(x - mean) / std` of large values, `1 / (1 - p)` of a p near one, differences of times or positions, a norm of raw features, thresholds.
Rounded before a difference, what is left of it may be nothing but rounding, or zero. So a plan does not round there, either, whatever a
cast in front would save.

1. A value is *exact* if no product is upstream: of inputs, weights and numbers alone. Rows of an embedding are not: they are learnt, and
   rounding them is rounding weights, where nothing magnifies it (4).
2. An exact value must not be rounded on its way to an op that magnifies a rounding: a difference or sum of exact values, a norm that
   takes a mean away, a softmax, a comparison or another step, a denied or unlisted op, a result of the graph. Ops that hand on a relative
   error as it is, such as views, products by one number, maxima, stay open where they lead to products alone.
3. A sum of an exact value and one that came of a product, `x * scale + shift`, may be large and exact beside a small product. It stays
   high, with what is made of it, on its way to a denied op, to a result, to a norm, to a softmax, to a step or a choice of places (the
   nearest code of a codebook, `argmin(a**2 - 2 * a @ b + b**2)`). A sum of such a sum is one, too, unless it closes a residual branch,
   whose other operand is made of it, and no input is in it. Masks are no such summands. Biases are none unless they have an offset
   (`Problem.offsets`) or are taken away, as centres are: layers add weights to products throughout. What joins an exact value with a
   product keeps a part exact, and so does what a product of fewer elements scales, or of as many if there may be an offset.
4. In training an op whose slope jumps, such as `relu`, `clamp`, `maximum`, `sort` or a maximum pool, reads in fp32 what has gradients and
   no product upstream, what is learnt included: of rounded values others are the greatest, many are equal, and gradients go elsewhere.
   So does a step, and a difference of such values or of one and a number in any mode, or of two sums of a product and what is learnt.
5. What torch.autocast holds in fp32 and many values were averaged to is more exact than they are (`ir/evidence/averages.py`). A norm, a
   softmax and a denied op read it in fp32, and so does a difference of two such or of one and a number; with it stays high what it is an
   average of, one by one.
6. So do ops that would magnify its rounding what else torch.autocast holds in fp32 (`ir/evidence/magnified.py`).
7. What facts pin stays as it is, and so does what an override asks for. Ties share a colour.

An input of an inner graph that the graph around it made of a product is not exact (`Problem.rounded`), unless a part of it is. So are
results of inner graphs of which a part is (`Problem.partly`).

By name it knows `add`, which may shift a weight by a number, and `sub`, which takes its second operand away.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Set

from amprewrite.ir.evidence.averages import averages
from amprewrite.ir.evidence.held_wide import held_wide
from amprewrite.ir.evidence.magnified import gives_places, is_step, magnified
from amprewrite.ir.evidence.running_sums import is_product, running_sums
from amprewrite.ir.op_graph import Demand, OpGraph, OpNode
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.decisions import Decisions
from amprewrite.ir.problem import Problem
from amprewrite.passes.paint.paint_ties import paint_ties
from amprewrite.tables.ops.op_lists import OPS, Trait, ops_with
from amprewrite.tables.vocabulary import OpKind, Reason

SUMS, STEPS, NORMS = ops_with(Trait.ADDS_UP), ops_with(Trait.HAS_STEPS), ops_with(Trait.TAKES_MEAN_AWAY)
STEEP, SOFTMAX = ops_with(Trait.MAGNIFIES_ROUNDING) | STEPS | NORMS, ops_with(Trait.SHARES_OUT)
LEARNT, KINKS = ops_with(Trait.LOOKS_UP), ops_with(Trait.HAS_KINKS)
DIFFERENCES = frozenset({"sub"})
LEVEL = NORMS | STEPS
UNIFORM, DRAWS = ops_with(Trait.UNIFORM), ops_with(Trait.RANDOM)
BOUNDED = frozenset(name for name, row in OPS.items() if row.bounded)


class RepaintUnrounded(Pass[Problem, Decisions]):
    name = "repaint-unrounded"

    def call(self, problem: Problem, decisions: Decisions) -> bool:
        before = dict(decisions.paints)
        found = Unrounded(problem)
        for name, reader in found.kept().items():
            decisions.keep_high(problem, name, found.reason(name), because_of="" if reader == name else reader)
        if decisions.paints != before:
            paint_ties(problem, decisions)
        return decisions.paints != before


class Unrounded:
    """The values of a graph that no product has rounded, by name.

    `exact` ones are made of inputs, weights and numbers, `sums` of one of those and a product. `unrounded` are both, and what is learnt.
    `biased` ones are sums of a product and what is learnt, and what is made of them one by one. `raw` ones have a part that may have an
    offset of any size: of an input, of numbers such as places, or of a weight that is known to have one. A norm takes offsets away.
    """

    def __init__(self, problem: Problem) -> None:
        self.graph, self.exact, self.sums, self.unrounded = problem.graph, set[str](), set[str](), set[str]()
        self.biased, self.raw = set[str](), set[str]()
        self.trained = problem.trained if problem.training else frozenset[str]()
        self._bit: dict[str, int] = {}  # of each sum
        self._made_of: dict[str, int] = {}  # the bits of all sums upstream of a value
        self.running = running_sums(problem.graph)
        self.offsets, self.partly = problem.offsets, problem.partly
        for node in problem.graph:
            if "fp32" in node.dtype.split("+") and node.name not in problem.rounded:
                self._classify(node)
        self.wide = held_wide(problem.graph, problem.device)
        self.averages = averages(problem.graph, self.wide, self.exact)

    def _classify(self, node: OpNode) -> None:
        given = [operand.value for operand in node.operands]
        self._made_of[node.name] = functools.reduce(operator.or_, (self._made_of.get(value, 0) for value in given), 0)
        learnt = self._looks_up(node)
        if not is_product(node) and (learnt or self.unrounded.issuperset(given)):
            self.unrounded.add(node.name)
        if self._is_raw(node, given):
            self.raw.add(node.name)
        if node.role != "op":
            self.exact.add(node.name)
        elif node.name not in self.partly and (is_product(node) or learnt):
            return
        elif node.name not in self.partly and self.exact.issuperset(given):
            self.exact.add(node.name)
        elif node.name in self.partly or (node.op not in LEVEL and (self._whole(node) or self._keeps_part(node))):
            self._number(node.name)
            self.sums.add(node.name)
            self.unrounded.add(node.name)
        elif self._is_biased(node):
            self._number(node.name)
            self.biased.add(node.name)

    def _number(self, name: str) -> None:
        self._bit[name] = 1 << len(self._bit)
        self._made_of[name] |= self._bit[name]

    def _is_raw(self, node: OpNode, given: list[str]) -> bool:
        if node.name in self.partly:
            return True
        if node.role != "op":
            return node.role == "input" or node.name in self.offsets
        if is_product(node) or node.op in NORMS | DRAWS | BOUNDED:
            return False
        return not self.raw.isdisjoint(given) if given else node.op not in UNIFORM

    def _looks_up(self, node: OpNode) -> bool:
        """Whether an op picks rows of a table that is held, and that have nothing in common that a difference would take away.

        By its name alone a file's `Gather` does, `x[:, -1]` of an input, too.
        """
        sources = [self.graph.seen(operand.value) for operand in node.operands]
        held = any(source.role in ("parameter", "buffer", "constant") for source in sources)
        return node.op in LEARNT and held and not any(source.name in self.offsets for source in sources)

    def _keeps_part(self, node: OpNode) -> bool:
        """Whether a part of the result is as exact as an operand that no product made, or all of it varies as that does.

        Sums, and what joins values or chooses among them, keep a part. A product's rounding that scales many values alike, as a gate of a
        channel does, is none that a difference of them would magnify. One of each value may be the same for two values with an offset:
        their difference is then as exact as theirs. Of values without one, such as angles, it is what torch.autocast has, too.
        """
        if node.name in self.running:
            return True
        firm = [operand for place, operand in enumerate(node.operands) if self._firm(node, place)]
        if not firm or node.op in LEVEL | SOFTMAX:
            return False
        if node.op in SUMS:
            return True
        if node.kind in (OpKind.INFER, OpKind.INTERNAL):
            scales = (operand.value for operand in node.operands if operand.value not in self.unrounded)
            return any(operand.value in self.raw for operand in firm) or all(self._spans(each) < node.numel for each in scales)
        return any(self.graph.seen(operand.value).op not in UNIFORM and operand.demand is not Demand.ANY for operand in firm)

    def _is_biased(self, node: OpNode) -> bool:
        """Whether an op adds what is learnt to a product, or hands such a sum on; one that closes a residual branch is none."""
        given = [operand.value for operand in node.operands]
        if node.op not in SUMS or all(each in self.biased or each in self.sums for each in given):
            alike = bool(given) and all(each in self.biased or each in self.exact or each in self.sums for each in given)
            return alike and node.kind in (OpKind.CLEAR, OpKind.INFER)
        learnt = (each for each in node.operands if each.value in self.unrounded and each.value not in self.sums)
        return any(not each.scalar for each in learnt) or any(each in self.biased and not self._closes_branch(node, each) for each in given)

    def _closes_branch(self, node: OpNode, value: str) -> bool:
        """Whether another operand of a sum is made of this one, which is a sum itself."""
        source, others = self.graph.seen(value), [other.value for other in node.operands if other.value != value]
        return any(self._made_of.get(other, 0) & self._bit.get(source.name, 0) for other in others)

    def _spans(self, name: str) -> int:
        """How many different elements a value has at most, before ops that read it alone repeated some."""
        node, least = self.graph[name], self.graph[name].numel
        while node.role == "op" and not is_product(node) and len(node.operands) == 1:
            node = self.graph[node.operands[0].value]
            least = min(least, node.numel)
        return least

    def _firm(self, node: OpNode, place: int) -> bool:
        """Whether torch.autocast reads an operand in fp32 and none of it may be lost: it is exact or keeps a part that is.

        Masks may be rounded if no input is in them, and so may biases. So may a sum that the other operand is made of, as that of a
        residual branch is, unless it is raw: an input with an offset may go through a stream of any length.
        """
        operand = node.operands[place]
        if operand.scalar or (self.graph[operand.value].may_saturate and operand.value not in self.raw):
            return False
        source = self.graph.seen(operand.value)
        if operand.value in self.sums:
            return operand.value in self.raw or not self._closes_branch(node, operand.value)
        taken_away = node.op in DIFFERENCES and place == 1
        bias = source.role in ("parameter", "constant") and source.name not in self.offsets and not taken_away
        return operand.value in self.exact and not bias

    def reason(self, name: str) -> Reason:
        """Why a value that must not be rounded has more bits than a product's."""
        if name in self.averages.names | self.averages.parts and name not in self.unrounded:
            return Reason.AVERAGED
        if name in self.sums | self.biased:
            return Reason.PARTLY_ROUNDED
        return Reason.UNROUNDED if name in self.unrounded else Reason.MAGNIFIED

    @property
    def through_streams(self) -> set[str]:
        """What is exact, or has a part that may have an offset: graphs inside read it as they read an input."""
        return self.exact | (self.sums & self.raw)

    def _whole(self, node: OpNode) -> bool:
        """Whether no operand came of a product alone."""
        return all(operand.value in self.exact or operand.value in self.sums for operand in node.operands)

    def kept(self) -> dict[str, str]:
        """The ops that must not round, each with an op that would magnify its rounding."""
        found: dict[str, str] = {}
        for node in self.graph:
            kept = self.unrounded | self.biased if node.op in DIFFERENCES else self.unrounded
            for name in self._needed(node):
                self._keep(name, node.name, found, kept)
            for operand in node.operands[:1] if node.op in NORMS else ():
                if operand.value in self.sums:
                    self._keep(operand.value, node.name, found, self.unrounded)
                    found[node.name] = operand.value
            self._keep_averages(node, found)
        return magnified(self.graph, self.wide, self.exact, self.raw) | found

    def _keep_averages(self, node: OpNode, found: dict[str, str]) -> None:
        """Keep the averages that a norm, a softmax or a denied op reads, or of which an op takes a difference, with their parts."""
        kept = self.unrounded | self.averages.names | self.averages.parts
        if node.op in SOFTMAX or node.kind in (OpKind.DENY, None):
            for operand in node.operands:
                if operand.value in self.averages.names:
                    self._keep(operand.value, node.name, found, kept)
                    found.setdefault(node.name, operand.value)
        if node.op in NORMS and node.operands and node.operands[0].value in self.averages.names:
            self._keep(node.operands[0].value, node.name, found, kept)
            found.setdefault(node.name, node.operands[0].value)
        elif node.name in self.averages.names and node.op in SUMS:
            several = sum(operand.value in self.averages.names for operand in node.operands) > 1
            if several or node.op in DIFFERENCES:  # a number beside one average is an epsilon
                self._keep(node.name, node.name, found, kept)

    def _needed(self, node: OpNode) -> Iterator[str]:
        """What must not be rounded for the sake of `node`: its operands, or the op itself."""
        given = [operand.value for operand in node.operands]
        if node.role == "output" or (node.role == "op" and node.kind in (OpKind.DENY, None)):
            yield from given
        elif node.op in STEEP | SUMS and node.name in self.exact and given and not _shifts_weight(node, self.graph):
            yield node.name
        elif (is_step(node) or gives_places(node, self.graph)) and self.unrounded.issuperset(given):
            yield from given
        elif self._needs_all(node):
            yield node.name
        elif node.name in self.sums and node.op in SUMS:
            parts = self.sums | self.biased if node.op in DIFFERENCES else self.sums
            whole = sum(operand.value in parts or self._firm(node, place) for place, operand in enumerate(node.operands))
            if whole > 1 or self._whole(node):
                yield node.name

    def _needs_all(self, node: OpNode) -> bool:
        """Whether an op reads in fp32 whatever no product alone has rounded: a softmax of sums, a kink, a difference of what is learnt."""
        if node.name in self.sums:
            return node.op in SOFTMAX or (node.op in KINKS and node.name in self.trained)
        if node.op in DIFFERENCES:
            kept = self.unrounded | self.biased if len(node.operands) > 1 else self.unrounded
            return all(operand.value in kept for operand in node.operands)
        return node.op in KINKS and node.name in self.trained

    def _keep(self, name: str, reader: str, found: dict[str, str], kept: Set[str]) -> None:
        """Keep an op that has full precision, and those that it has it from, if they are among `kept`."""
        waiting = [(name, reader)]
        while waiting:
            name, reader = waiting.pop()
            if name not in found and name in kept and self.graph[name].role == "op":
                found[name] = reader
                waiting += [(operand.value, name) for operand in self.graph[name].operands]


def _shifts_weight(node: OpNode, graph: OpGraph) -> bool:
    """Whether an op adds a number to a weight, `1 + weight`: that is rounded as the weight itself would be."""
    return node.op == "add" and len(node.operands) == 1 and graph.seen(node.operands[0].value).role == "parameter"


__all__ = ["RepaintUnrounded", "Unrounded"]
