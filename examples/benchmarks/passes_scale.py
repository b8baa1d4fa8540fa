"""How the deciding passes scale: seconds a pass on synthetic op graphs, no model and no capture.

    python examples/benchmarks/passes_scale.py [nodes …]        default: 2500 10000 40000

The graph is a transformer's: norm, four matmuls, softmax, scale, mask, two residual sums and an MLP a block, every tenth
block with a denied op, weights and biases as parameters, split heads tied. Printed: the best of five runs, pass by pass.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from amprewrite.ir.op_graph import Demand, Operand, OpGraph, OpNode
from amprewrite.ir.pass_base import Decisions, Problem, run_passes
from amprewrite.ir.policies.policy import Policy
from amprewrite.passes import PIPELINES
from amprewrite.tables.formats import BF16
from amprewrite.tables.ops.op_lists import OPS, op_lists
from amprewrite.tables.vocabulary import Colour, Reason

LISTS = op_lists("default", BF16, "cuda")


def vertex(name: str, op: str, *reads: str, numel: int = 1 << 18, precision_group: str = "") -> OpNode:
    demand = Demand.PROMOTE if OPS[op].promotes else Demand.COLOUR
    operands = tuple(Operand(read, demand) for read in reads)
    return OpNode(name, op, LISTS.kind(op), operands, "fp32", numel=numel, precision_group=precision_group)


def source(name: str, role: str) -> OpNode:
    return OpNode(name, role, dtype="fp32", numel=1 << 16, role=role, pinned=(Colour.HIGH, Reason.PARAMETER, role))


def block(index: int, stream: str) -> Iterator[OpNode]:
    """One transformer block; the last vertex is the new residual stream."""

    def n(name: str) -> str:
        return f"{name}_{index}"

    weights = [n(f"w{i}") for i in range(4)]
    yield from (source(weight, "parameter") for weight in weights)
    yield vertex(n("norm"), "layer_norm", stream)
    yield vertex(n("qkv"), "linear", n("norm"), weights[0])
    yield vertex(n("split"), "chunk", n("qkv"), precision_group=n("split"))
    for part in "qkv":
        yield vertex(n(part), "getitem", n("split"), precision_group=n("split"))
        yield vertex(n(f"{part}_heads"), "transpose", n(part))
    yield vertex(n("scores"), "matmul", n("q_heads"), n("k_heads"))
    yield vertex(n("scaled"), "div", n("scores"))
    yield vertex(n("masked"), "masked_fill", n("scaled"))
    yield vertex(n("softmax"), "exp" if index % 10 == 9 else "softmax", n("masked"))
    yield vertex(n("mixed"), "matmul", n("softmax"), n("v_heads"))
    yield vertex(n("joined"), "reshape", n("mixed"))
    yield vertex(n("out"), "linear", n("joined"), weights[1])
    yield vertex(n("first_sum"), "add", stream, n("out"))
    yield vertex(n("norm2"), "layer_norm", n("first_sum"))
    yield vertex(n("up"), "linear", n("norm2"), weights[2])
    yield vertex(n("gelu"), "gelu", n("up"))
    yield vertex(n("down"), "linear", n("gelu"), weights[3])
    yield vertex(n("sum"), "add", n("first_sum"), n("down"))


def transformer(nodes: int) -> Problem:
    """A problem of at least `nodes` vertices, nothing decided yet."""
    made = [source("x", "input")]
    index = 0
    while len(made) < nodes - 1:
        made += block(index, made[-1].name)
        index += 1
    made.append(OpNode("output", "output", operands=(Operand(made[-1].name, Demand.HIGH),), role="output",
                       pinned=(Colour.PLAIN, Reason.NO_FLOAT, "")))  # fmt: skip
    return Problem(graph=OpGraph.of(made), policy=Policy(BF16), lists=LISTS, training=True)


def best_of(runs: int, nodes: int) -> tuple[int, int, list[float]]:
    """Vertices, casts, and the fewest seconds that each pass took."""
    timed = []
    for _ in range(runs):
        problem, decisions, seconds = transformer(nodes), Decisions(), []
        for each in PIPELINES["cost"]:
            start = time.perf_counter()
            run_passes((each,), problem, decisions)
            seconds.append(time.perf_counter() - start)
        timed.append(seconds)
    return len(problem.graph.nodes), len(decisions.casts), [min(seconds) for seconds in zip(*timed, strict=True)]


def main(sizes: list[int]) -> None:
    print(f"{'nodes':>7} {'casts':>6} {'total s':>8} {'x':>5}  " + "  ".join(f"{each.name:>15}" for each in PIPELINES["cost"]))
    before = 0.0
    for size in sizes:
        nodes, casts, seconds = best_of(5, size)
        total = sum(seconds)
        factor = f"{total / before:5.2f}" if before else "    -"
        print(f"{nodes:7} {casts:6} {total:8.3f} {factor}  " + "  ".join(f"{each:15.4f}" for each in seconds))
        before = total


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [2500, 10_000, 40_000])
