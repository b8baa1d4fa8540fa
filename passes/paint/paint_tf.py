"""The rest of TensorFlow's auto_mixed_precision.cc, made independent of node order.

Step numbers are TensorFlow's; 1 (allowed ops) and 2 (deny flows forward) are done by `paint`.

3. A clear or infer op on a path of such ops between two allowed ops is low.
4. An infer op that directly follows a low op, with no denied op feeding it, is low. TensorFlow's result depends on the
   order in which it visits nodes; here the step repeats until nothing changes. (New in 2025, PR 84874; a switch.)
5. Clear ops that touch a low node, from either side, are low.
6. What is left is high.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from amprewrite.ir.op_graph import OpNode
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.program import Program
from amprewrite.passes.paint.paint import paint_ties
from amprewrite.tables.vocabulary import Colour, OpKind, Reason


class PaintTF(Pass):
    name = "paint-tf"

    def call(self, program: Program) -> bool:
        if program.lists.rule != "tf":
            return False
        before = len(program.paints)
        paint_between_allow(program)
        if program.lists.infer_after_allow:
            paint_after_allow(program)
        paint_beside_allow(program)
        paint_ties(program)
        for node in program.graph:
            if node.name not in program.paints:
                program.paint(node.name, Colour.HIGH, Reason.NOT_REACHED)
        return len(program.paints) != before


def _free(program: Program, node: OpNode, *kinds: OpKind) -> bool:
    return node.name not in program.paints and node.kind in kinds and node.carries_fp32


def _low(program: Program, name: str) -> bool:
    return name in program.paints and program.paints[name].colour is Colour.LOW


def _in_order(program: Program, nodes: Iterable[OpNode]) -> list[OpNode]:
    found = list(nodes)
    return found if len(found) < 2 else sorted(found, key=lambda node: program.graph.rank[node.name])


def paint_between_allow(program: Program) -> None:
    graph = program.graph
    allowed = [node.name for node in graph if node.kind is OpKind.ALLOW and _low(program, node.name)]
    down: set[str] = set()
    queue = deque(allowed)
    while queue:
        for reader in graph.readers(queue.popleft()):
            if reader.name not in down and _free(program, reader, OpKind.CLEAR, OpKind.INFER, OpKind.INTERNAL):
                down.add(reader.name)
                queue.append(reader.name)
    roots = deque((name, name) for name in allowed)
    while roots:
        name, root = roots.popleft()
        between = (feeder for feeder in graph.feeders(name) if feeder.name in down and feeder.name not in program.paints)
        for feeder in _in_order(program, between):
            program.paint(feeder.name, Colour.LOW, Reason.BETWEEN_ALLOW, because_of=root)
            roots.append((feeder.name, root))


def paint_after_allow(program: Program) -> None:
    queue = deque(node.name for node in program.graph if _low(program, node.name))
    while queue:
        name = queue.popleft()
        free = (reader for reader in program.graph.readers(name) if _free(program, reader, OpKind.INFER, OpKind.INTERNAL))
        for reader in _in_order(program, free):
            if not any(_denied(program, feeder.name) for feeder in program.graph.feeders(reader.name)):
                program.paint(reader.name, Colour.LOW, Reason.AFTER_ALLOW, because_of=name)
                queue.append(reader.name)


def _denied(program: Program, name: str) -> bool:
    paint = program.paints.get(name)
    return paint is not None and paint.reason in (Reason.ON_DENYLIST, Reason.AFTER_DENY)


def paint_beside_allow(program: Program) -> None:
    queue = deque(node.name for node in program.graph if _low(program, node.name))
    while queue:
        name = queue.popleft()
        beside = (*program.graph.feeders(name), *program.graph.readers(name))
        for near in _in_order(program, {near.name: near for near in beside if _free(program, near, OpKind.CLEAR)}.values()):
            program.paint(near.name, Colour.LOW, Reason.BESIDE_ALLOW, because_of=name)
            queue.append(near.name)
