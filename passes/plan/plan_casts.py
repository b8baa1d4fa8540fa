"""Plan a cast wherever an op reads a value of the other format. Readers of the same value in the same format share one cast.

1. For each operand, in canonical order, find the format in which its reader takes it.
2. If the value has another format, the reader takes a copy. Readers of one value in one format share a copy, unless the value is written
   in place between them, or only some of them run without gradients (such readers have another write version).
3. An fp32 op that promotes mixed dtypes needs no cast of a low operand. But in training it reads the fp32 copy of the operand if other
   readers have one, so that autograd casts the gradient only once. With one plan for all graphs (`Policy.parity`), inference does so, too.
4. In training, the readers of a low copy that many ops read (`Problem.read_by_many`) form groups. Autograd adds the gradients of the groups
   in fp32.
5. A constant of an ONNX file takes the format of the op that reads it. One low copy, stored in the file, serves all low readers. Finite
   values beyond the low format's range become ±max. A graph that PyTorch captured has no such constants: its weights are inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

from amprewrite.ir.op_graph import resolved
from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.ir.plans.plan import Cast
from amprewrite.tables.errors import PassError
from amprewrite.tables.formats import FP32
from amprewrite.tables.vocabulary import Colour, Edit


class PlanCasts(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        bare = [node.name for node in problem.graph if node.name not in decisions.paints]
        if bare:
            raise PassError(f"plan-casts wants every node painted; {bare[0]} and {len(bare) - 1} more are not")
        decisions.casts = (*plan_casts(problem, decisions), *_stored_low(problem, decisions))
        low = (cast for cast in decisions.casts if cast.to == problem.policy.low.name and not cast.saturate)  # `linked_copy` cannot clamp
        for value in dict.fromkeys(cast.value for cast in low if problem.training and cast.value in problem.read_by_many):
            decisions.edit(problem, value, Edit.SPREAD_COPIES)


def plan_casts(problem: Problem, decisions: Decisions) -> tuple[Cast, ...]:
    """Return the casts that the colours (low or high) of the nodes require, in the order of their first users in the graph."""
    colours, low = decisions.colours, problem.policy.low.name
    users: dict[tuple[str, str, int], list[str]] = {}
    for node in problem.graph:
        for operand, want in resolved(node, colours[node.name], colours, problem.graph.nodes):
            key = (operand.value, low if want is Colour.LOW else FP32.name, operand.write_version)
            users.setdefault(key, []).append(node.name)
    if problem.training or problem.policy.parity is not None:
        _join_copies(problem, colours, users)
    return tuple(
        Cast(
            value,
            to,
            tuple(readers),
            saturate=to == low and problem.graph[value].may_saturate,
            weight=problem.graph[value].role == "parameter",
            write_version=write_version,
        )
        for (value, to, write_version), readers in users.items()
    )


def _stored_low(problem: Problem, decisions: Decisions) -> Iterator[Cast]:
    """Yield a cast for each constant of an ONNX file that ops read in the low format. The file stores the low copy."""
    readers: dict[str, dict[str, None]] = {}
    for read in problem.constants:
        if decisions.paints[read.follows].colour is Colour.LOW:
            readers.setdefault(read.constant, {})[read.reader] = None
    saturating = {read.constant for read in problem.constants if read.loss is not None and read.loss.saturated}
    for constant, users in readers.items():
        yield Cast(constant, problem.policy.low.name, tuple(users), saturate=constant in saturating, weight=True)


def _join_copies(problem: Problem, colours: dict[str, Colour], users: dict[tuple[str, str, int], list[str]]) -> None:
    """Let an fp32 op read the fp32 copy of a low-precision operand if other readers have one, even if the op could promote the operand.

    Autograd then casts the gradient of the operand only once. `users` maps (value, format, write version) of each copy to the names of its
    readers. The function adds these fp32 ops to `users`, in place.
    """
    for node in problem.graph:
        for operand in node.promoted if colours[node.name] is Colour.HIGH else ():
            readers = users.get((operand.value, FP32.name, operand.write_version))
            if colours[operand.value] is Colour.LOW and readers is not None and node.name not in readers:
                readers.append(node.name)
                readers.sort(key=problem.graph.rank.__getitem__)
