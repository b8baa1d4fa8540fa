"""Keep softmax and sigmoid results high if a logarithm reads them, and the ops between the two.

Shares come arbitrarily close to zero and one, and a low format does not: fp16 flushes below 6e-8, and bf16 rounds 0.9981 to one.

1. Before a logarithm, a softmax stays high in a format of narrow range, which would flush its shares: `log(softmax(x) + 1e-9)`. A sigmoid
   stays high in any format, as it may be near one: `log(1 - sigmoid(x))`.
2. Before `binary_cross_entropy` both stay high in any format: it reads the rest to one as well, and its slope reaches 1e12. torch.autocast
   refuses it.
3. A sigmoid that the graph returns, directly or through views, stays high, because such a loss may follow outside. A softmax does so in a
   narrow format, unless a product reads it, as it reads the weights of attention.
4. Ops in between work element by element, such as sums, bounds and views. Pins and overrides stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

from amprewrite.ir.decisions import Decisions
from amprewrite.ir.op_graph import Operand, OpGraph, OpNode
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.problem import Problem
from amprewrite.passes.paint.paint_ties import paint_ties
from amprewrite.tables.ops.op_lists import OPS, Trait, ops_with
from amprewrite.tables.vocabulary import OpKind, Reason

FEW = 16
"""Number of ops to examine before a logarithm."""
LOGS, LOSSES = ops_with(Trait.LOGARITHM), ops_with(Trait.LOGS_OF_BOTH)
SHARES, SOFTMAX = ops_with(Trait.NEARS_ITS_ENDS), ops_with(Trait.SHARES_OUT)


class RepaintShares(Pass[Problem, Decisions]):
    name = "repaint-shares"

    def call(self, problem: Problem, decisions: Decisions) -> bool:
        before = dict(decisions.paints)
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
        if decisions.paints != before:
            paint_ties(problem, decisions)
        return decisions.paints != before


def _leading(
    graph: OpGraph, operands: Iterable[Operand], shares: Set[str], kinds: tuple[OpKind, ...] = (OpKind.CLEAR, OpKind.INFER)
) -> Iterator[str]:
    """Ops of `shares` that lead to these operands through element-wise ops of these `kinds`, and the ops in between."""
    behind: dict[str, list[str]] = {}
    waiting = {operand.value for operand in operands}
    while waiting and len(behind) < FEW:
        name = max(waiting, key=graph.rank.__getitem__)  # readers before makers
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
    """Kind of an op by its own row, since lists that run everything low give all ops one kind. Any op with FLOPs counts as ALLOW."""
    if node.role != "op" or node.op not in OPS:
        return None
    return OpKind.ALLOW if node.flops else OPS[node.op].kind


__all__ = ["RepaintShares"]
