"""Keep in fp32 the values that a low format cannot hold, as calibration, a sample run, weights and constants show.

1. *Overflow*. A value is at risk if its largest magnitude comes near the format's largest number, or if the probability of an overflow in
   one forward pass, from a fit to the tail of its distribution, is above RISK. Masks that saturate by design are not at risk.
2. *Underflow*. A value is at risk if all its elements lie below the normal range and it is not added to far larger values, or if elements
   would be flushed to zero before an op that has a pole at zero (log, reciprocal, rsqrt, a divisor).
3. The op that makes such a value runs in fp32, and so does every op that would read a low copy of the value. But if elements would
   only be flushed before a pole, the readers without a pole may stay low.
4. Weights are known without calibration. An op runs in fp32 if it reads a weight, or a view of it, with elements beyond the range, or with
   so small elements that all would become zero. But a bias may become zero if a sample run shows a far larger sum.
5. Constants of a file are examined element by element (`ir/evidence/constants.py`).
6. *Cancellation.* A difference that is far smaller than its operands magnifies their rounding: the difference and its operands stay fp32.
7. Tied nodes (with shared memory or a shared kernel) get one colour. Overrides stay in force, and a note names their risk.

The pass makes no node low.

Op names hard-coded in this pass: `add` and `sub`, whose results may cancel; `div`, which has a pole where its divisor is zero; and `to`,
which has no rounding error if it converts integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from amprewrite.ir.evidence.constants import lost_constants
from amprewrite.ir.evidence.range_rules import (
    MASK,
    POLES,
    SUMS_SMALL,
    Fit,
    bias_drowns,
    drowned,
    fit,
    hands_on_small,
    near_the_end,
)
from amprewrite.ir.evidence.ranges import ValueRange
from amprewrite.ir.op_graph import Demand, OpNode
from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.formats import Format
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

RISK = 1e-3
"""A value is at risk if the probability that it overflows in one forward pass is larger than this."""
FLUSHED = 1e-3
"""Largest share of the elements of an operand that may become zero, or lose bits, before an op with a pole at zero."""
MAGNIFIES = 16
"""A difference cancels if its largest operand is larger than its largest result by this factor: four bits are lost then."""


class RepaintByRange(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        low = problem.policy.low
        seen = problem.calibration.of(problem.graph) if problem.calibration is not None else None
        values = seen.values if seen is not None else {}
        for name, text in lost_constants(problem.graph, problem.constants, values, low).items():
            _keep_high(decisions, problem.graph[name], text, Reason.CONSTANT)
        # Add no note if `model` is "": then the graph is an ONNX file, or the rewritten model measured the ranges in its own first calls.
        if low.narrow and seen is None and problem.calibration is not None and problem.calibration.model:
            decisions.note("calibration never ran this graph: no ranges are known here")
        risks = find_risks(problem, values)
        for name, text in risks.makers.items():
            _keep_high(decisions, problem.graph[name], text)
        for name, text in risks.readers.items():
            _keep_high(decisions, problem.graph[name], text, Reason.CONSTANT if name in risks.of_weights else Reason.OUT_OF_RANGE)
        for name, text in find_cancelling(problem, values).items():
            _keep_high(decisions, problem.graph[name], text, Reason.CANCELS)
        decisions.tie(problem)


@dataclass
class Risks:
    """Ops that must run in fp32, each with the evidence as a text: `makers` because of their result, `readers` because of an operand."""

    makers: dict[str, str] = field(default_factory=dict)
    readers: dict[str, str] = field(default_factory=dict)
    of_weights: set[str] = field(default_factory=set)
    """The ops of `readers` whose operand at risk is a weight."""


def find_risks(problem: Problem, values: Mapping[str, ValueRange]) -> Risks:
    """Return the ops that must run in fp32 because the low format cannot hold their results or operands, with the evidence.

    `values` maps nodes to the ranges of their values in sample runs; {} without sample runs.
    """
    low, risks = problem.policy.low, Risks()
    for node in problem.graph:
        if not node.carries_fp32 or node.may_saturate:
            continue
        weight = node.role in ("parameter", "buffer") or node.name in problem.magnitudes  # in a subgraph, weights have the role of inputs
        weight = weight or (node.name not in values and _of_weight(problem, node) != node.name)
        text = _too_large_weight(problem, node) if weight else _out_of_range(problem, node, values)
        if text:
            if node.role == "op":
                risks.makers[node.name] = text
            bias = weight and _fit(problem, node) is Fit.FLUSHED
            for reader in _low_readers(problem, node, values if bias else None):
                risks.readers.setdefault(reader.name, f"its input {text}")
                if weight:
                    risks.of_weights.add(reader.name)
    for node in problem.graph:
        for operand in _at_pole(node, risks.makers):
            text = _flushed(operand, node.name, values, low)
            if text and any(reader.name == node.name for reader in _low_readers(problem, problem.graph[operand])):
                risks.readers.setdefault(node.name, text)
            _keep_exact(problem, operand, node.name, values, risks, low)
    return risks


def _keep_high(decisions: Decisions, node: OpNode, text: str, reason: Reason = Reason.OUT_OF_RANGE) -> None:
    paint = decisions.paints.get(node.name)
    if paint is not None and paint.reason is Reason.ASKED and paint.colour is Colour.LOW:
        decisions.note(f"{node.name} runs low because {paint.detail!r} asks for it, though {text}")
    elif paint is None or (paint.colour is Colour.LOW and paint.reason is not Reason.BODY):  # BODY: a subgraph returns the value low
        decisions.paint(node.name, Colour.HIGH, reason, detail=text)


def _low_readers(problem: Problem, node: OpNode, drowns: Mapping[str, ValueRange] | None = None) -> Iterator[OpNode]:
    """Yield the ops that would read a low-precision copy of the value of `node` if they ran in the low format.

    `drowns`, if given, maps ops to the ranges of their results. An op is then left out if it adds the value as a bias, and if its result is
    so large that the low format would lose the bias anyway.
    """
    for reader in problem.graph.readers(node.name):
        harmless = drowns is not None and bias_drowns(drowns.get(reader.name), problem.policy.low)
        own = [o for o in reader.operands if o.value == node.name and not (harmless and o.summand)]
        if reader.carries_fp32 and any(o.demand in (Demand.COLOUR, Demand.PROMOTE) for o in own):
            yield reader


# -- overflow -------------------------------------------------------------------------------
def _out_of_range(problem: Problem, node: OpNode, values: Mapping[str, ValueRange]) -> str:
    seen, low = values.get(node.name), problem.policy.low
    if seen is None or not seen.nonzero:
        return ""
    chance = seen.overflow_in_pass(low)
    if near_the_end(seen.amax, low) or chance > RISK:
        return f"{node.name} reaches {seen.amax:.3g}, {low.name} ends at {low.max:g}: P(overflow) is {chance:.2g} a pass"
    if 0 < seen.amax < low.smallest_normal and not drowned(problem.graph, node, values, low):
        return f"{node.name} stays within {seen.amax:.3g}, {low.name} thins out at {low.smallest_normal:.3g}"
    return ""


def _of_weight(problem: Problem, node: OpNode) -> str:
    """If `node` is a view or part of a weight of known range, return the name of the weight; otherwise the name of `node`."""
    source = problem.graph.seen(node.name).name
    return source if source in problem.magnitudes else node.name


def _too_large_weight(problem: Problem, node: OpNode) -> str:
    """Return why a weight does not fit the low format: it is too large, or (despite this name) flushed to zero. Return "" if it fits."""
    size, low, known = problem.magnitudes.get(_of_weight(problem, node), 0.0), problem.policy.low, _fit(problem, node)
    if known is Fit.TOO_LARGE:
        return f"{node.name} holds {size:.3g}, {low.name} ends at {low.max:g}"
    if known is Fit.FLUSHED:
        return f"{node.name} holds at most {size:.3g}, {low.name} flushes that to zero"
    return ""


def _fit(problem: Problem, weight: OpNode) -> Fit:
    return fit(problem.magnitudes.get(_of_weight(problem, weight), 0.0), problem.policy.low)


# -- underflow ------------------------------------------------------------------------------
def _at_pole(node: OpNode, found: Mapping[str, str]) -> Iterator[str]:
    """Yield the operands of `node` for which the op has a pole at zero, such as a divisor.

    A division with a Python number has one operand, so that `1 / x` and `x / 2` look alike. It counts as `1 / x` if it is in `found`, the
    ops whose result the low format cannot hold.
    """
    if node.op in POLES:
        yield from (operand.value for operand in node.operands)
    elif node.op == "div" and len(node.operands) == 2:
        yield node.operands[1].value
    elif node.op == "div" and node.name in found:  # one operand is a Python number: the tensor may be the divisor, as in 1 / x
        yield from (operand.value for operand in node.operands)


def _flushed(name: str, pole: str, values: Mapping[str, ValueRange], low: Format) -> str:
    """Return the reason why the op `pole` must not read the value `name` in the format `low`; "" if it may.

    `pole` has a pole at zero, as a logarithm has. It must not read a value if `low` would make elements zero or too many subnormal.
    """
    seen = values.get(name)
    if seen is None or not seen.nonzero:
        return ""
    flushed, thin = seen.underflow(low), seen.subnormal(low)
    # check not only the shares but also the smallest element, because even one zero at a pole gives an infinity
    if max(flushed, thin) <= FLUSHED and seen.smallest >= low.smallest_subnormal:
        return ""
    share = f"{100 * flushed:.2g} % of it would be zero in {low.name}, {100 * thin:.2g} % lose bits"
    return f"{pole} has a pole at zero, {name} comes down to {seen.smallest:.3g}: {share}"


def _keep_exact(
    problem: Problem, name: str, pole: str, values: Mapping[str, ValueRange], risks: Risks, low: Format, depth: int = 6
) -> None:
    """Record in `risks.makers` that the op `name` must run in fp32, if the low format would flush numbers in its result that `pole` needs.

    The op `pole` has a pole at zero, as a logarithm has. If the op `name` passes small numbers on, its operands are examined in the same
    way, at most `depth` ops back.
    """
    node, text = problem.graph[name], _flushed(name, pole, values, low)
    if node.role != "op" or not text or name in risks.makers:
        return
    risks.makers[name] = text
    if depth and (node.kind is OpKind.CLEAR or hands_on_small(node.op) or node.op in SUMS_SMALL):
        for operand in node.operands:
            _keep_exact(problem, operand.value, pole, values, risks, low, depth - 1)


# -- cancellation -----------------------------------------------------------------------------
def find_cancelling(problem: Problem, values: Mapping[str, ValueRange]) -> dict[str, str]:
    """Return {op: evidence} for sums and differences far smaller than an operand, and for this operand. `values` are ranges by op name."""
    graph, found = problem.graph, dict[str, str]()
    for node in graph:
        result = values.get(node.name)
        if node.op not in ("add", "sub") or len(node.operands) != 2 or result is None or not result.amax or node.may_saturate:
            continue
        for operand in node.operands:
            made, seen = graph[operand.value], values.get(operand.value)
            exact = made.op == "to" and not made.operands and made.pinned is None  # `made` converts integers: it has no rounding error
            if seen is None or exact or not MAGNIFIES * result.amax < seen.amax < MASK:
                continue
            text = f"{node.name} stays within {result.amax:.3g}, {made.name} reaches {seen.amax:.3g}"
            found.setdefault(node.name, text)
            while made.name not in found:
                found[made.name] = text
                if made.kind is OpKind.CLEAR and made.operands:  # keep the base of a view in fp32, too: a view of a rounded base is rounded
                    made = graph[made.operands[0].value]
    return found
