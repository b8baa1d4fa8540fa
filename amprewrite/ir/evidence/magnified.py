"""What torch.autocast holds in fp32 and an op then magnifies: rounded, it would leave another error than torch.autocast has.

`1 - sigmoid(y.float())`, `(y * gain + 500) - 500`, `log(1 + 0.001 * y)`, `softmax(y.float()).topk(2)`. A product has rounded y, and what
follows may round it as finely as that. But 1 has 256 times the rounding of 0.001 * y, and a sigmoid near one that of its distance from it.

1. A value is *straight* if it varies as what products gave does: it is one, or made of those by moves, factors, averages, and sums with
   another such. So is a norm's result, and what has a straight part that a product has just rounded. Rounded again it is about as far off
   as it was. A sum with a number or with what may have an offset, a bound, a function, or a product of two such is *bent*: it may hold what
   varies beside what does not. Masks and biases bend nothing.
2. Bent values that torch.autocast holds in fp32 stay fp32, with the bent ones that they are made of, in front of a difference, a logarithm,
   a softmax, a denied op, and an op that chooses or counts.
3. A batch norm reads all in fp32 that torch.autocast holds so: a gradient in front of it is what is left of many that nearly cancel.

By name it knows `getitem`, which picks one result of several.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from amprewrite.ir.evidence.running_sums import is_product
from amprewrite.ir.op_graph import OpGraph, OpNode
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import OpKind

DIFFERENCES, LOGARITHMS, SOFTMAX = ops_with(Trait.TAKES_AWAY), ops_with(Trait.LOGARITHM), ops_with(Trait.SHARES_OUT)
NORMS, BATCH_NORMS = ops_with(Trait.TAKES_MEAN_AWAY), ops_with(Trait.TAKES_BATCH_MEAN)
SUMS, FACTORS, AVERAGES = ops_with(Trait.ADDS_UP), ops_with(Trait.SCALES), ops_with(Trait.AVERAGES)
DIVIDES, CONVERSIONS, BOUNDS, STEPS = (ops_with(each) for each in (Trait.DIVIDES, Trait.CONVERTS, Trait.BOUNDS, Trait.HAS_STEPS))


def magnified(graph: OpGraph, wide: Set[str], exact: Set[str], raw: Set[str]) -> dict[str, str]:
    """The ops that must not round, each with an op that would magnify it.

    torch.autocast holds `wide` values in fp32, no product is upstream of `exact` ones, and `raw` ones may have an offset.
    """
    return _Magnified(graph, wide, exact, raw).found


class _Magnified:
    def __init__(self, graph: OpGraph, wide: Set[str], exact: Set[str], raw: Set[str]) -> None:
        self.graph, self.wide, self.exact, self.offset = graph, wide, exact, exact & raw
        self.bent: set[str] = set()
        self.found: dict[str, str] = {}
        for node in graph:
            if node.role != "op" or is_product(node):
                continue
            if node.name in wide and node.name not in exact and not self._is_straight(node):
                self.bent.add(node.name)
            for name in self._needed(node):
                self._keep(name, node.name, self.bent)
            if node.op in BATCH_NORMS and node.operands and node.operands[0].value in wide:
                self._keep(node.operands[0].value, node.name, wide)
                self.found.setdefault(node.name, node.operands[0].value)

    def _is_straight(self, node: OpNode) -> bool:
        given = [operand.value for operand in node.operands if not operand.scalar]
        straight = self.bent.isdisjoint(given)
        if node.op in SUMS:
            return len(given) > 1 and (any(each not in self.wide for each in given) or (straight and self.offset.isdisjoint(given)))
        if node.op in FACTORS:
            varies = [place for place, each in enumerate(given) if each not in self.exact]
            squared = any(operand.twice for operand in node.operands)
            return straight and len(varies) < 2 and not squared and (node.op not in DIVIDES or varies == [0])
        bounds = node.op in BOUNDS and not node.may_saturate
        return node.op in NORMS or (straight and not bounds and (node.kind is OpKind.CLEAR or node.op in CONVERSIONS | AVERAGES))

    def _needed(self, node: OpNode) -> Iterator[str]:
        """The bent values that must not be rounded for the sake of `node`, and the op itself if it reads them."""
        given = [operand.value for operand in node.operands if not operand.scalar]
        bent = [each for each in given if each in self.bent]
        takes_away = node.op in DIFFERENCES and all(each in self.wide for each in given)
        chooses = is_step(node) or gives_places(node, self.graph)
        if bent and (takes_away or chooses or node.op in LOGARITHMS | SOFTMAX or node.kind in (OpKind.DENY, None)):
            if "fp32" in node.dtype:
                self.found.setdefault(node.name, node.name)
            yield from bent

    def _keep(self, name: str, reader: str, kept: Set[str]) -> None:
        waiting = [(name, reader)]
        while waiting:
            name, reader = waiting.pop()
            if name not in self.found and name in kept and self.graph[name].role == "op":
                self.found[name] = reader
                waiting += [(operand.value, name) for operand in self.graph[name].operands]


def is_step(node: OpNode) -> bool:
    """Whether the result jumps: by the op's name, or as it makes whole numbers, which may say where to look, of others."""
    return node.op in STEPS or (node.op in CONVERSIONS and node.dtype.startswith(("int", "uint", "bool")))


def gives_places(node: OpNode, graph: OpGraph) -> bool:
    """Whether a result of the op that is read says where, not what, as the indices of `min` do."""
    return any(reader.op == "getitem" and not reader.carries_fp32 for reader in graph.readers(node.name))


__all__ = ["gives_places", "is_step", "magnified"]
