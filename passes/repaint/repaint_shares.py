"""Keep results of softmax and sigmoid in fp32 if a logarithm reads them, together with the ops in between.

Such results (shares) come arbitrarily close to zero and one. Low formats do not: fp16 flushes below 6e-8, and bf16 rounds 0.9981 to one.

1. Before a logarithm, a softmax stays fp32 if the low format has a narrow range, which would flush its results: `log(softmax(x) + 1e-9)`. A
   sigmoid stays fp32 with any low format, because its result may be near one: `log(1 - sigmoid(x))`.
2. Before `binary_cross_entropy` both stay fp32 with any low format, because this loss takes the logarithms of x and of 1 - x, and its
   gradient reaches 1e12. torch.autocast refuses this loss.
3. A sigmoid that the graph returns, directly or through views, stays fp32, because this loss may follow outside the graph. So does a
   returned softmax if the low format has a narrow range. Results that a product reads, too, such as attention weights, are left out.
4. The ops in between work element by element, such as sums, bounds and views. Forced colours and overrides stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

from amprewrite.ir.op_graph import Operand, OpGraph, OpNode
from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.ops.op_lists import OPS, Trait, ops_with
from amprewrite.tables.vocabulary import OpKind, Reason

FEW = 16
"""Largest number of ops that the pass examines upstream of one logarithm, loss or output, to find a softmax or sigmoid."""
LOGS, LOSSES = ops_with(Trait.LOGARITHM), ops_with(Trait.LOGS_OF_BOTH)
SHARES, SOFTMAX = ops_with(Trait.NEARS_ITS_ENDS), ops_with(Trait.SHARES_OUT)


class RepaintShares(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        graph, rounded = problem.graph, SHARES if problem.policy.low.narrow else SHARES - SOFTMAX
        for node in graph:
            if node.op in LOSSES:
                kept = _leading(graph, node.operands[:1], SHARES)
            elif node.op in LOGS:
                kept = _leading(graph, node.operands, rounded)
            elif node.role == "output":
                leaving = _leading(graph, node.operands, rounded, (OpKind.CLEAR,))
                kept = (name for name in leaving if not any(_kind(reader) is OpKind.ALLOW for reader in graph.readers(name)))
            else:
                continue
            for name in kept:
                decisions.keep_high(problem, name, Reason.TOLD_APART, because_of=node.name)
        decisions.tie(problem)


def _leading(
    graph: OpGraph, operands: Iterable[Operand], shares: Set[str], kinds: tuple[OpKind, ...] = (OpKind.CLEAR, OpKind.INFER)
) -> Iterator[str]:
    """Yield the softmax and sigmoid ops that lead to `operands` through ops of these `kinds` alone, and the ops in between.

    `shares` holds the names of the ops that count as softmax or sigmoid. At most FEW ops are examined.
    """
    behind: dict[str, list[str]] = {}
    waiting = {operand.value for operand in operands}
    while waiting and len(behind) < FEW:
        name = max(waiting, key=graph.rank.__getitem__)  # take the last in graph order: the loop then visits a value after its readers
        waiting.remove(name)
        node = graph[name]
        behind[name] = [operand.value for operand in node.operands] if node.op not in shares and _kind(node) in kinds else []
        waiting.update(behind[name])
    leading: set[str] = set()
    for name in reversed(behind):
        if graph[name].op in shares or not leading.isdisjoint(behind[name]):
            leading.add(name)
            yield name


def _kind(node: OpNode) -> OpKind | None:
    """Return the kind of an op: ALLOW if it has FLOPs, otherwise its kind in the op table; None if `node` is no op of the table.

    The op's kind in the op lists (`node.kind`) is not used, because some lists give all ops one kind.
    """
    if node.role != "op" or node.op not in OPS:
        return None
    return OpKind.ALLOW if node.flops else OPS[node.op].kind
