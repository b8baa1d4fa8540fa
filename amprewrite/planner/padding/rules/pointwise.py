"""Padding rules (`padding/rule.py`) of element-wise ops. Each computes the number in the result's padding from the operands' padding.

This file knows some ops by name: `where`, whose first argument is the condition, and `rsub`, `mul`, `div`, `maximum` and `minimum`, whose
arithmetic it repeats on the numbers in the padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from amprewrite.ir.op_graph import Ref
from amprewrite.planner.padding.rule import BROADCAST, LARGEST, MIXED, Content, Contents, Hazard, Leg, Rule, View, aligned, moved
from amprewrite.tables.ops.op_lists import Trait, ops_with


def _number(value: float) -> float:
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise Hazard("padding would leave fp16's range")
    return value


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


ALWAYS: dict[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0), "neg": lambda x: -x, "abs": abs, "sin": math.sin, "cos": math.cos, "tanh": math.tanh,
    "sigmoid": _sigmoid, "silu": lambda x: x * _sigmoid(x), "erf": math.erf, "exp": math.exp, "expm1": math.expm1,
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))), "mish": lambda x: x * math.tanh(_softplus(x)),
    "relu6": lambda x: min(max(x, 0.0), 6.0), "hardsigmoid": lambda x: min(max(x / 6 + 0.5, 0.0), 1.0),
    "hardswish": lambda x: x * min(max(x / 6 + 0.5, 0.0), 1.0), "softsign": lambda x: x / (1 + abs(x)),
    "square": lambda x: x * x, "log_sigmoid": lambda x: -_softplus(-x), "atan": math.atan, "sinh": math.sinh, "cosh": math.cosh,
    "asinh": math.asinh, "tanhshrink": lambda x: x - math.tanh(x), "round": round, "floor": math.floor, "ceil": math.ceil,
    "trunc": math.trunc, "sign": lambda x: float((x > 0) - (x < 0)), "positive": lambda x: x,
}  # fmt: skip
"""Op → the function that it computes if the input is its only argument. The function and its slope are finite at every finite number."""
ABOVE_ZERO: dict[str, Callable[[float], float]] = {
    "sqrt": math.sqrt, "rsqrt": lambda x: 1 / math.sqrt(x), "log": math.log, "log2": math.log2, "log10": math.log10,
    "reciprocal": lambda x: 1 / x, "log1p": math.log1p,
}  # fmt: skip
"""Op → the function that it computes. It is applied only to padding above zero, since most have an infinite value or slope at zero."""
AT_ZERO = ops_with(Trait.KEEPS_ZERO)
_ONE_INPUT, _NO_LARGER = ops_with(Trait.ONE_INPUT), ops_with(Trait.NO_LARGER)


def _unary(op: str) -> Callable[[Contents], Content]:
    def content(contents: Contents) -> Content:
        found = moved(contents)
        if found == 0 and op in AT_ZERO:
            return 0.0
        if isinstance(found, float | int) and op in ALWAYS:
            try:
                return _number(ALWAYS[op](found))
            except OverflowError as error:
                raise Hazard("padding would leave fp16's range") from error
        if isinstance(found, float | int) and op in ABOVE_ZERO and found > 0:
            return _number(ABOVE_ZERO[op](found))
        if op in _NO_LARGER:
            return MIXED
        raise Hazard(f"{op} of the padding, or its slope, is not finite" if found == 0 else f"{op} of the padding is unknown")

    return content


def _arithmetic(view: View, op: str) -> Callable[[Contents], Content]:
    """Return a function that computes the number in the padding of the result of `op`, an op on two operands such as `add`.

    The function takes {name of an operand: number in its padding}. It raises Hazard if the result's number is unknown, infinite or large.
    """
    call = view.call
    operands = list(call.args[:2]) if len(call.args) >= 2 else [call.get(0, "input"), call.get(1, "other")]
    alpha = call.kwargs.get("alpha", 1)

    def of(operand: Any, contents: Contents) -> Content | None:
        if isinstance(operand, Ref):
            return contents.get(operand.name)
        return float(operand) if isinstance(operand, int | float) else None

    def content(contents: Contents) -> Content:
        a, b = (of(operand, contents) for operand in operands)
        if op == "rsub":
            a, b = b, a
        if op == "mul" and (a == 0 or b == 0):
            return 0.0
        if op == "div" and a == 0 and isinstance(b, float) and b != 0:
            return 0.0
        if a is None or b is None or BROADCAST in (a, b) or not isinstance(alpha, int | float):
            raise Hazard(f"{op} puts unknown values into the padding")
        if isinstance(a, str) or isinstance(b, str):
            if op not in ("mul", "div") and alpha == 1:
                return MIXED
            raise Hazard(f"{op} of padding with mixed content")
        if op == "div" and b == 0:
            raise Hazard("the padding would be divided by zero")
        if op in ("maximum", "minimum"):
            return max(a, b) if op == "maximum" else min(a, b)
        return _number({"add": a + alpha * b, "sub": a - alpha * b, "rsub": a - alpha * b, "mul": a * b, "div": a / b if b else 0}[op])

    return content


# -- pointwise ------------------------------------------------------------------------------
def pointwise(view: View) -> Rule:
    """Return the padding rule of an op with one tensor operand. All dims may be padded, unless the call has arguments unknown to the rule.

    The rule applies the op to the number in the operand's padding, to get the number in the result's padding.
    """
    call = view.call
    source = call.get(0, "input", call.kwargs.get("self"))
    rule = Rule(content=_unary(call.op))
    further = len(call.args) > 1 or not {"input", "self", "inplace"}.issuperset(call.kwargs)
    if call.op in ALWAYS and call.op not in _ONE_INPUT and further:
        return Rule(why_opaque=f"{call.op} is called with arguments that the rule does not know")
    aligned(view, rule, [source], view.out)
    return rule


def prelu(view: View) -> Rule:
    """Return the padding rule of prelu. All dims may be padded. If each channel has its own slope, slopes and channels are padded alike."""
    x, w = view.call.get(0, "input"), view.call.get(1, "weight")
    xs, ws = view.shape(x), view.shape(w)
    rule = Rule(content=_unary("prelu"))
    if xs is None or ws is None or len(xs) < 2:
        return Rule(why_opaque="prelu without channels")
    for dim in range(len(xs)):
        legs: list[Leg] = [((x.name, dim),), ((0, dim),)]
        if dim == 1 and ws[-1] != 1:
            legs.append(((w.name, len(ws) - 1),))
        rule.tie(*legs)
    return rule


def binary(view: View) -> Rule:
    """Return the padding rule of arithmetic on two operands. A dim may be padded if all operands that have it are floating tensors."""
    call = view.call
    rule = Rule(content=_arithmetic(view, call.op))
    if call.kwargs.get("rounding_mode") is not None:
        return Rule(why_opaque=f"{call.op} rounds")
    aligned(view, rule, [*call.args, *call.kwargs.values()], view.out)
    return rule


def clamp(view: View) -> Rule:
    """Return the padding rule of a clamp. All dims may be padded if the bounds are numbers. No dim may be padded if a bound is a tensor."""
    low, high = view.call.get(1, "min"), view.call.get(2, "max")
    if isinstance(low, Ref) or isinstance(high, Ref):
        return Rule(why_opaque="clamp between tensors")

    def content(contents: Contents) -> Content:
        found = moved(contents)
        if isinstance(found, str):
            return MIXED
        found = found if low is None else max(found, low)
        return _number(found if high is None else min(found, high))

    rule = Rule(content=content)
    aligned(view, rule, [view.call.get(0, "input")], view.out)
    return rule


def power(view: View) -> Rule:
    """Return the padding rule of `pow`. All dims may be padded if the power and its derivative are finite for the number in the padding."""
    exponent = view.call.get(1, "exponent")

    def content(contents: Contents) -> Content:
        found = moved(contents)
        if isinstance(exponent, int | float) and isinstance(found, float | int):
            if found > 0:
                return _number(found**exponent)
            if found == 0 and exponent >= 1:
                return 0.0
        raise Hazard("a power of the padding, or its slope, is not finite")

    rule = Rule(content=content)
    aligned(view, rule, [view.call.get(0, "input")], view.out)
    return rule


def where(view: View) -> Rule:
    """Return the padding rule of `where` and `masked_fill`.

    A dim may be padded if the condition is broadcast along it. (A boolean mask cannot be padded.) Both values between which the op chooses
    must hold zeros in their padding.
    """
    call = view.call
    if call.op == "where":
        condition, sides = call.get(0, "condition"), call.args[1:3]
    else:
        condition, sides = call.get(1, "mask"), (call.get(0, "input"), call.get(2, "value"))
    if len(sides) < 2:
        return Rule(why_opaque="where with one argument gives places")

    def content(contents: Contents) -> Content:
        for side in sides:
            if (contents.get(side.name) if isinstance(side, Ref) else side) != 0:
                raise Hazard(f"{call.op} puts values into the padding")
        return 0.0

    rule = Rule(content=content)
    aligned(view, rule, [condition, *sides], view.out)
    return rule
