"""Choose low or high (fp32) for the remaining nodes by steps 3 to 6 of TensorFlow's auto_mixed_precision.cc.

The numbers are TensorFlow's: `paint-lists` does step 1 (allowed ops), `paint-after-deny` step 2. `OpKind` defines clear, infer, internal.

3. A clear, infer or internal op on a path of such ops between two allowed ops is low.
4. An infer or internal op that directly follows a low op is low, if no operand of it comes from a denied op or an op of step 2. In
   TensorFlow the result depends on the order in which it visits nodes. Here the step repeats until nothing changes. TensorFlow has this
   step since 2025 (PR 84874). The op lists may switch it off (`infer_after_allow`).
5. Clear ops that touch a low node, from either side, are low.
6. All other nodes are high.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from amprewrite.ir.op_graph import OpNode, reached
from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.vocabulary import Colour, OpKind, Reason


class PaintTF(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        paint_between_allow(problem, decisions)
        if problem.lists.infer_after_allow:
            paint_after_allow(problem, decisions)
        paint_beside_allow(problem, decisions)
        decisions.tie(problem)
        for node in problem.graph:
            if node.name not in decisions.paints:
                decisions.paint(node.name, Colour.HIGH, Reason.NOT_REACHED)


def _free(decisions: Decisions, node: OpNode, *kinds: OpKind) -> bool:
    return node.name not in decisions.paints and node.kind in kinds and node.carries_fp32


def _low(decisions: Decisions, name: str) -> bool:
    return name in decisions.paints and decisions.paints[name].colour is Colour.LOW


def _in_order(problem: Problem, nodes: Iterable[OpNode]) -> list[OpNode]:
    found = list(nodes)
    return found if len(found) < 2 else sorted(found, key=lambda node: problem.graph.rank[node.name])


def paint_between_allow(problem: Problem, decisions: Decisions) -> None:
    graph = problem.graph
    allowed = [node.name for node in graph if node.kind is OpKind.ALLOW and _low(decisions, node.name)]

    def free_readers(name: str) -> Iterator[str]:
        return (each.name for each in graph.readers(name) if _free(decisions, each, OpKind.CLEAR, OpKind.INFER, OpKind.INTERNAL))

    down = set(reached(allowed, free_readers))
    roots = deque((name, name) for name in allowed)
    while roots:
        name, root = roots.popleft()
        between = (feeder for feeder in graph.feeders(name) if feeder.name in down and feeder.name not in decisions.paints)
        for feeder in _in_order(problem, between):
            decisions.paint(feeder.name, Colour.LOW, Reason.BETWEEN_ALLOW, because_of=root)
            roots.append((feeder.name, root))


def paint_after_allow(problem: Problem, decisions: Decisions) -> None:
    queue = deque(node.name for node in problem.graph if _low(decisions, node.name))
    while queue:
        name = queue.popleft()
        free = (reader for reader in problem.graph.readers(name) if _free(decisions, reader, OpKind.INFER, OpKind.INTERNAL))
        for reader in _in_order(problem, free):
            if not any(_denied(decisions, feeder.name) for feeder in problem.graph.feeders(reader.name)):
                decisions.paint(reader.name, Colour.LOW, Reason.AFTER_ALLOW, because_of=name)
                queue.append(reader.name)


def _denied(decisions: Decisions, name: str) -> bool:
    paint = decisions.paints.get(name)
    return paint is not None and paint.reason in (Reason.ON_DENYLIST, Reason.AFTER_DENY)


def paint_beside_allow(problem: Problem, decisions: Decisions) -> None:
    queue = deque(node.name for node in problem.graph if _low(decisions, node.name))
    while queue:
        name = queue.popleft()
        beside = (*problem.graph.feeders(name), *problem.graph.readers(name))
        for near in _in_order(problem, {near.name: near for near in beside if _free(decisions, near, OpKind.CLEAR)}.values()):
            decisions.paint(near.name, Colour.LOW, Reason.BESIDE_ALLOW, because_of=name)
            queue.append(near.name)
