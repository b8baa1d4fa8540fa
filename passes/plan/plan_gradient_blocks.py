"""Group the weights of a training graph into blocks that share an autograd node, so that a few kernel launches return all gradients.

1. Candidates are the weights that the graph reads in a low copy. With a loss scale, weights that it reads in fp32 are candidates, too,
   because their gradients must be unscaled.
2. Weights are taken in graph order. A block ends at MOST weights, or before it exceeds `Problem.block_size` elements, because each gradient
   has to wait for the rest of its block.
3. A weight with at least `Problem.block_size` elements is a block by itself.

A given plan names its blocks. If it names none, they are decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from amprewrite.ir.decisions import Decisions
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.problem import Problem
from amprewrite.tables.errors import PlanError

MOST = 64
"""Largest number of weights in a block. torch's multi-tensor kernels take 64 in a launch (MultiTensorApply.cuh, depth_to_max_tensors)."""


class PlanGradientBlocks(Pass[Problem, Decisions]):
    name = "plan-gradient-blocks"

    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        if not problem.block_size:
            return
        weights = [node for node in problem.graph if node.role == "parameter"]
        if problem.given is not None and problem.given.gradient_blocks:
            decisions.gradient_blocks = _checked(problem.given.gradient_blocks, {node.name for node in weights})
        else:
            cast = {each.value for each in decisions.casts if each.weight}
            chosen = [node for node in weights if problem.scale_loss or node.name in cast]
            found = blocks([node.numel for node in chosen], problem.block_size)
            decisions.gradient_blocks = tuple(tuple(chosen[place].name for place in block) for block in found)


def _checked(given: tuple[tuple[str, ...], ...], weights: Set[str]) -> tuple[tuple[str, ...], ...]:
    """Return the blocks of a given plan. PlanError if a name is no weight of the graph, or occurs twice."""
    counted = Counter(name for block in given for name in block)
    wrong = [name for name, count in counted.items() if count > 1 or name not in weights]
    if wrong:
        why = "is in two of them" if wrong[0] in weights else "is no weight of this graph"
        raise PlanError(f"{wrong[0]} of the plan's gradient_blocks {why}; leave them empty to have them decided")
    return given


def blocks(numels: Sequence[int], elements: int) -> tuple[tuple[int, ...], ...]:
    """Return blocks of weights as tuples of indices into `numels`.

    `numels` holds the number of elements of each weight, in order of use. A block of several weights has at most `elements` elements.
    """
    made: list[tuple[int, ...]] = []
    run: list[int] = []
    size = 0
    for index, numel in enumerate(numels):
        if numel >= elements:
            made.append((index,))
            continue
        if run and (len(run) == MOST or size + numel > elements):
            made.append(tuple(run))
            run, size = [], 0
        run.append(index)
        size += numel
    if run:
        made.append(tuple(run))
    return tuple(sorted(made))
