"""Padding rules (`padding/rule.py`) of sums, norms, pooling, matrix products, convolutions, attention, embeddings and recurrent layers.

This file knows some ops by name: `mm`, `bmm`, `addmm` and `baddbmm`, because their operands have different keyword names, and convolutions
with `transpose` in their name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amprewrite.ir.op_graph import Ref
from amprewrite.planner.padding.rule import BROADCAST, Content, Contents, Hazard, Leg, Part, Rule, View, all_zero, moved, zero_keeping


# -- sums and norms ---------------------------------------------------------------------------------
def reduction(view: View) -> Rule:
    """Return the padding rule of sums and means over some dims. The other dims may be padded. A sum over all dims is never padded.

    Summed dims keep their unpadded size: a padded operand is sliced, which runs no kernel. Padding of the other dims must hold zeros.
    """
    call = view.call
    source, dims = call.get(0, "input", call.kwargs.get("self")), call.get(1, "dim")
    shape = view.shape(source)
    dims = (dims,) if isinstance(dims, int) else dims
    keep = call.get(2, "keepdim", False)
    if shape is None or not isinstance(dims, tuple) or not dims or not all(isinstance(d, int) for d in dims):
        return Rule(why_opaque=f"{call.op} over all dims needs logical sizes")
    summed = {d % len(shape) for d in dims}
    rule, after = Rule(content=all_zero("sums of padding that is not zero")), 0
    for d in range(len(shape)):
        if d not in summed:
            rule.tie(((source.name, d),), ((0, after),))
        after += d not in summed or bool(keep)
    return rule


def batch_norm(view: View) -> Rule:
    """Return the padding rule of batch norm. The channels may be padded.

    The op's weight and bias are padded with zeros, so that the padding of the result is zero. Without a weight the padding of the operand
    must be zero. In training the running statistics stay unpadded: the op that replaces batch norm pads a copy of them in each call.
    """
    given = view.call.kwargs
    x, mean, var, weight, bias = map(given.get, ("input", "running_mean", "running_var", "weight", "bias"))
    training, eps = given.get("training", False), given.get("eps", 1e-5)
    shape = view.shape(x)
    if not isinstance(x, Ref) or shape is None or len(shape) < 2 or view.call.several or not isinstance(training, bool):
        return Rule(why_opaque="batch_norm on something other than a single tensor")
    if not (isinstance(eps, float) and eps > 0):
        return Rule(why_opaque="batch_norm with eps=0 divides by the variance of the padding")
    needs_zero = all_zero("without a scale of its own batch_norm keeps what the padding holds")
    rule = Rule(content=_weighted(weight, bias) if isinstance(weight, Ref) else needs_zero)
    vectors = [weight, bias] if training else [mean, var, weight, bias]
    rule.ignored = {ref.name for ref in (mean, var) if training and isinstance(ref, Ref)}
    rule.tie(((x.name, 1),), ((0, 1),), *(((v.name, 0),) for v in vectors if isinstance(v, Ref)))
    return rule


def normalised(view: View) -> Rule:
    """Return the padding rule of softmax, and of norms other than batch norm. No dim may be padded: padding would change the result."""
    return Rule(why_opaque=f"{view.call.op} runs over the logical size")


def channels(view: View) -> Rule:
    """Return the padding rule of pooling and interpolation. The channels may be padded."""
    source = view.call.get(0, "input")
    shape = view.shape(source)
    spatial = int(digits[0]) if (digits := [c for c in view.call.op if c.isdigit()]) else None
    if shape is None or view.call.several or (spatial is not None and len(shape) != spatial + 2) or len(shape) < 3:
        return Rule(why_opaque=f"{view.call.op} without a batch, or with further results")
    rule = Rule(content=zero_keeping)
    rule.tie(((source.name, 1),), ((0, 1),))
    return rule


# -- matrix products ----------------------------------------------------------------------------------
def _weighted(weight: Any, bias: Any) -> Callable[[Contents], Content]:
    """Return the content rule of a product with a weight: the padding of the result holds zeros.

    The rule raises Hazard if the padding of weight or bias is not zero. The padding of the other operand may hold any finite numbers.
    """

    def content(contents: Contents) -> Content:
        blamed = [ref.name for ref in (weight, bias) if isinstance(ref, Ref) and contents.get(ref.name, 0) not in (0, BROADCAST)]
        if blamed:
            raise Hazard("the padding of a weight must be zero", blamed)
        return 0.0

    return content


def linear(view: View) -> Rule:
    """Return the padding rule of a linear layer. Input and output features may be padded; weight and bias are padded with zeros."""
    x, w, b = (view.call.get(i, name) for i, name in enumerate(("input", "weight", "bias")))
    xs, ws = view.shape(x), view.shape(w)
    if xs is None or ws is None or len(ws) != 2 or not xs:
        return Rule(why_opaque="linear on something other than plain tensors")
    rule = Rule(content=_weighted(w, b))
    out = len(view.out) - 1
    rule.tie(((x.name, len(xs) - 1),), ((w.name, 1),))
    rule.tie(((w.name, 0),), ((0, out),), *([((b.name, 0),)] if isinstance(b, Ref) else []))
    rule.wants = [(x.name, len(xs) - 1), (0, out)]
    return rule


_BOTH_ZERO = "a product of two activations needs zero padding on both sides"


def matmul(view: View, first: int = 0) -> Rule:
    """Return the padding rule of a product of two matrices, or batches of them. Rows, columns and the summed dim may be padded with zeros.

    `first` is the position of the first factor among the arguments. If it is 1, argument 0 is added to the product. Rows or columns are
    not padded if this argument is broadcast along them. Products with a vector are not padded.
    """
    names = ("input", "mat2") if view.call.op in ("mm", "bmm") else ("input", "other")
    names = ("mat1", "mat2") if view.call.op == "addmm" else ("batch1", "batch2") if view.call.op == "baddbmm" else names
    a, b = view.call.get(first, names[0]), view.call.get(first + 1, names[1])
    left, right = view.shape(a), view.shape(b)
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        return Rule(why_opaque="a product with a vector gains nothing")
    rule = Rule(content=all_zero(_BOTH_ZERO))
    rank = len(view.out)
    addend: Any = view.call.get(0, "input") if first else None
    terms = view.shape(addend) if first else None
    rule.tie(((a.name, len(left) - 1),), ((b.name, len(right) - 2),))
    legs: list[Leg] = [((b.name, len(right) - 1),), ((0, rank - 1),)]
    if terms and terms[-1] != 1:
        legs.append(((addend.name, len(terms) - 1),))
    if not (terms is not None and (not terms or terms[-1] == 1)):
        rule.tie(*legs)
    if terms is None or len(terms) >= 2:
        rows: list[Leg] = [((a.name, len(left) - 2),), ((0, rank - 2),)]
        if terms is None or terms[-2] != 1:
            rule.tie(*rows, *([((addend.name, len(terms) - 2),)] if terms else []))
    rule.wants = [(a.name, len(left) - 1), (0, rank - 1)]
    return rule


def with_addend(view: View) -> Rule:
    """Return the padding rule of addmm and baddbmm: the rule `matmul` for ops that add a matrix product to their first operand."""
    return matmul(view, 1)


def conv(view: View) -> Rule:
    """Return the padding rule of convolutions. Input and output channels may be padded.

    In a depthwise convolution they are padded together. Channels of other grouped convolutions are not padded.
    """
    call = view.call
    transposed = "transpose" in call.op
    nd = int(call.op[-2])
    x, w, b = (call.get(i, name) for i, name in enumerate(("input", "weight", "bias")))
    groups = call.get(6, "groups", 1)
    xs, ws = view.shape(x), view.shape(w)
    if xs is None or ws is None or len(xs) != nd + 2 or not isinstance(groups, int):
        return Rule(why_opaque="a convolution without a batch")
    rule = Rule(content=_weighted(w, b))
    bias: list[Leg] = [((b.name, 0),)] if isinstance(b, Ref) else []
    if groups == 1:
        rule.tie(((x.name, 1),), ((w.name, 0 if transposed else 1),))
        rule.tie(((w.name, 1 if transposed else 0),), ((0, 1),), *bias)
        rule.wants = [(x.name, 1), (0, 1)]
    elif groups == xs[1] == view.out[1]:
        rule.tie(((x.name, 1),), ((w.name, 0),), ((0, 1),), *bias)
    else:
        rule.why_opaque = "a grouped convolution: channels belong to groups of logical size"
        rule.wants = [(x.name, 1), (0, 1)]
    return rule


def attention(view: View) -> Rule:
    """Return the padding rule of attention. The head size of queries and keys may be padded, and the head size of values and result.

    If the two sizes are equal, they are padded together. The scale of the scores is still computed from the size without padding.
    """
    call = view.call
    q, k, v = (call.get(i, name) for i, name in enumerate(("query", "key", "value")))
    shapes = [view.shape(x) for x in (q, k, v)]
    if any(s is None or len(s) < 2 for s in shapes) or (call.get(6, "scale") is None and isinstance(shapes[0][-1], str)):  # type: ignore[index]
        return Rule(why_opaque="attention on something other than plain tensors")
    rule = Rule(content=all_zero(_BOTH_ZERO))
    legs: list[Leg] = [((x.name, len(s) - 1),) for x, s in zip((q, k, v), shapes, strict=True) if s]
    legs.append(((0, len(view.out) - 1),))
    if len({s[-1] for s in shapes if s}) == 1:
        rule.tie(*legs)
    else:
        rule.tie(*legs[:2])
        rule.tie(*legs[2:])
    rule.wants = [(q.name, len(shapes[0]) - 1), (v.name, len(shapes[2]) - 1)]  # type: ignore[arg-type]
    return rule


def einsum(view: View) -> Rule:
    """Return the padding rule of an einsum of two operands.

    Dims with the same letter are padded together. If the equation has an ellipsis, or a letter twice in one term, no dim may be padded.
    """
    call = view.call
    operands = call.args[1] if len(call.args) == 2 and isinstance(call.args[1], tuple) else call.args[1:]
    equation = call.args[0].replace(" ", "") if call.args and isinstance(call.args[0], str) else ""
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    shapes = [view.shape(o) for o in operands]
    plain = arrow and "." not in equation and len(terms) == 2 == len(operands) and all(len(set(t)) == len(t) for t in (*terms, output))
    if not plain or any(s is None or len(s) != len(t) for s, t in zip(shapes, terms, strict=False)) or operands[0] == operands[1]:
        return Rule(why_opaque="an einsum beyond two plain operands")
    rule = Rule(content=all_zero(_BOTH_ZERO))
    for letter in dict.fromkeys(inputs.replace(",", "")):
        legs: list[Leg] = [((o.name, t.index(letter)),) for o, t in zip(operands, terms, strict=True) if letter in t]
        if letter in output:
            legs.append(((0, output.index(letter)),))
        sizes = {s[t.index(letter)] for s, t in zip(shapes, terms, strict=True) if s and letter in t}
        if len(legs) > 1 and len(sizes) == 1:
            rule.tie(*legs)
            summed = letter not in output
            if summed or (letter == output[-1:] and sum(letter in t for t in terms) == 1):
                side = int(letter not in terms[0])
                rule.wants.append((operands[side].name, terms[side].index(letter)))
    return rule


def embedding(view: View) -> Rule:
    """Return the padding rule of an embedding. The features may be padded, unless the op has a `max_norm` or sparse gradients.

    The table may also get further rows, because they are never looked up. The exception is a table with a negative `padding_idx`, which
    counts from the table's end.
    """
    call = view.call
    weight = call.get(1, "weight")
    shape = view.shape(weight)
    padding_idx = call.get(2, "padding_idx")
    if shape is None or call.get(3, "max_norm") is not None or call.get(6, "sparse", False):
        return Rule(why_opaque="an embedding that renormalises or has sparse gradients")
    rule = Rule(content=moved)
    rule.tie(((weight.name, 1),), ((0, len(view.out) - 1),))
    if not isinstance(padding_idx, int) or padding_idx >= 0:
        rule.tie(((weight.name, 0),))
        rule.whole.add((weight.name, 0))
    return rule


def recurrent(view: View, gates: int) -> Rule:
    """Return the padding rule of a recurrent layer with `gates` gates. Input and hidden size may be padded, the latter inside every gate.

    The padding of weights and initial states must be zero, so that the padding of all states stays zero.
    """
    call = view.call
    refuse = Rule(why_opaque=f"{call.op} in a form whose weights the rule does not know")
    if len(call.args) < 9 or not view.shape(call.args[0]) or not isinstance(call.args[3], bool):
        return refuse
    x, hx, weights, biases, layers, _, _, both, _ = call.args[:9]
    states = hx if isinstance(hx, tuple) else (hx,)
    per = 4 if biases else 2
    sides = 2 if both else 1
    if not isinstance(weights, tuple) or len(weights) != layers * sides * per or len(view.shape(x) or ()) != 3:
        return refuse
    if any(view.shape(w) is None for w in (*weights, *states)):
        return refuse
    names = [w.name for w in weights]
    hidden: Part = (states[0].name, 2)
    rule = Rule(content=all_zero("weights and first states must be zero in the padding", {*names, *(s.name for s in states)}))
    rule.tie(*(((s.name, 2),) for s in states), *(((i, 2),) for i in range(1, len(call.shapes))))
    whole: Leg = (2, hidden) if both else (hidden,)
    rule.tie(((0, 2),), whole)
    for layer in range(layers):
        for side in range(sides):
            w_ih, w_hh, *b = names[(layer * sides + side) * per :][:per]
            for name in (w_ih, w_hh, *b):
                rule.tie(((name, 0),), (gates, hidden) if gates > 1 else (hidden,))
            rule.tie(((w_hh, 1),), (hidden,))
            rule.tie(((w_ih, 1),), whole if layer else ((x.name, 2),))
    rule.wants = [(x.name, 2), (states[0].name, 2)]
    return rule
