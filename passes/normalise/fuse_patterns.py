"""Fuse norms, softmax and GELU that are written out by hand into one op each, such as `F.layer_norm`.

Without fusion, the ops of such a pattern round every intermediate result, or need casts around the values that must stay fp32. The kernel
of the fused op reads and writes the low format and computes in fp32 inside. These patterns are recognised, with their usual variations:

1. GELU's tanh form:  0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))                     gelu(approximate="tanh")
2. softmax:           exp(x − max) / sum, with or without the maximum                   softmax
3. layer norm:        (x − mean) / √(mean((x − mean)²) + ε), times weight, plus bias    layer_norm
4. RMS norm:          x / √(mean(x²) + ε), times weight                                 rms_norm (stays fp32 on a CPU)

A pattern is fused only if no node outside it reads its intermediate values, and the lists allow its op to run low. A norm over a dim of
symbolic size is not fused, because the kernels take numbers. Patterns in the model's own autocast regions and in torch.func transforms
stay written out. No node may write to the operands between the first and the last node of a pattern. If gradients are recorded, none may
write to the operands or the result afterwards, because the kernel may save them for backward, and no `no_grad` may begin or end inside
the pattern. Conversions to fp32 inside a pattern are left out, because the kernel makes them. The pass edits a copy of the graph.

Op names hard-coded in this pass, as parts of the patterns: `mul`, `div`, `square`, `pow`, `sqrt`, `rsqrt`, `exp`, `tanh`, `sum`, `mean`,
`var`, `amax`, `max`, `getitem`, `detach`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F

from amprewrite.graphs.fx.captured import EditedGraph, Reading
from amprewrite.graphs.fx.node_facts import (
    CONVERSIONS,
    GRAD_SWITCHES,
    comparable,
    example_value,
    in_autocast,
    memory_of,
    transformed_nodes,
    written,
)
from amprewrite.ir.pass_base import Pass
from amprewrite.tables.formats import FP32
from amprewrite.tables.ops.op_lists import OpLists, Trait, op_name, ops_with
from amprewrite.tables.vocabulary import OpKind
from amprewrite.torch_internals.trees import tree_leaves

Node = torch.fx.Node


@dataclass
class Pattern:
    """A norm, softmax or GELU written out by hand: its last node `end`, its other nodes `inside`, and the call that replaces them all."""

    end: Node
    op: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    inside: set[Node] = field(default_factory=set)


Match = Callable[[Node], Pattern | None]
"""A function that returns the pattern of one kind that ends at a node; None if there is none."""


class FusePatterns(Pass[Reading, EditedGraph]):
    def __call__(self, reading: Reading, edited: EditedGraph) -> None:
        if reading.low is not FP32:
            fuse_patterns(edited, reading.lists)


def fuse_patterns(edited: EditedGraph, lists: OpLists) -> None:
    """Replace each norm, softmax and GELU that is written out by hand by one call, in a copy of the graph (`edited.module`)."""
    if lists.rule != "cost":
        return
    units = list(find_patterns(edited.module.graph, lists))
    if not units:
        return
    copy_of = edited.make_own()
    graph = edited.module.graph
    for unit in units:
        end = copy_of(unit.end)
        args = torch.fx.map_arg((unit.args, unit.kwargs), copy_of)
        with graph.inserting_before(end):
            call = graph.call_function(unit.target, *args)
        call.meta = dict(end.meta)
        end.replace_all_uses_with(call)
        for node in sorted((copy_of(node) for node in unit.inside | {unit.end}), reverse=True):
            graph.erase_node(node)
    edited.module.recompile()


def find_patterns(graph: torch.fx.Graph, lists: OpLists) -> Iterator[Pattern]:
    """Yield the norms, softmaxes and GELUs of a graph that are written out by hand and may be fused. They do not overlap.

    The search runs from the last node to the first, so that it finds a norm together with its bias.
    """
    ops = {node: _op(node) for node in graph.nodes}
    every = set(ops.values())
    sought: dict[str, list[Match]] = {}
    for match, ends, needs in _PATTERNS:
        for end in ends if every.issuperset(needs) else ():
            sought.setdefault(end, []).append(match)
    if not sought:
        return
    taken = in_autocast(graph) | transformed_nodes(graph)
    writes = [(node, storage) for node in graph.nodes for target in written(node) for storage in memory_of(target)]
    switches = [node for node in graph.nodes if op_name(node.target) in GRAD_SWITCHES]
    for node in reversed(graph.nodes):
        matches = sought.get(ops[node])
        if matches is None or node in taken or not _is_fp32(node):
            continue
        for match in matches:
            unit = match(node)
            if unit is not None and _closed(unit, writes, switches) and _allowed(unit, lists) and not unit.inside & taken:
                taken |= unit.inside | {node}
                yield unit
                break


def _closed(unit: Pattern, writes: Sequence[tuple[Node, int]], switches: Sequence[Node]) -> bool:
    """True if one call can replace the nodes of a pattern: none of them writes in place, and only they read the inner results.

    The call stands at the last node, so nothing may write to the operands between the first and the last node. If the result requires a
    gradient, two more rules hold. Nothing may write to operands or result later, because backward reads them. No node of `switches`, which
    turn gradients on or off, may be between the first and the last node. `writes` has a pair (node, storage) for each write of the graph.
    """
    unit.inside.discard(unit.end)
    members = unit.inside | {unit.end}
    start, kept = min(members), example_value(unit.end).requires_grad
    operands = {storage for leaf in tree_leaves((unit.args, unit.kwargs)) if isinstance(leaf, Node) for storage in memory_of(leaf)}
    saved = operands | memory_of(unit.end) if kept else set()
    if any((start < node < unit.end and storage in operands) or (unit.end < node and storage in saved) for node, storage in writes):
        return False
    if kept and any(start < node < unit.end for node in switches):
        return False
    return not any(map(written, members)) and all(user in members for node in unit.inside for user in node.users)


def _allowed(unit: Pattern, lists: OpLists) -> bool:
    """True if the lists let the fused op of a pattern run low, and no override of the user names an op that the pattern contains."""
    ops = {op_name(node.target) for node in (*unit.inside, unit.end)}
    return lists.kind(unit.op) not in (None, OpKind.DENY) and not ops & lists.asked


# -- reading arithmetic expressions -----------------------------------------------------------
def _is_fp32(node: Any) -> bool:
    value = example_value(node) if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def _op(node: Any) -> str:
    return op_name(node.target) if isinstance(node, Node) and node.op in ("call_function", "call_method") else ""


def _argument(node: Node, place: int, *names: str) -> Any:
    """Return the argument at position `place`, otherwise the keyword argument of the first name in `names` that has one, otherwise None."""
    found = next((node.kwargs[name] for name in names if name in node.kwargs), None)
    return node.args[place] if len(node.args) > place else found


def _two(node: Any, op: str) -> tuple[Any, Any] | None:
    """Return the two arguments of `node` if it is the op `op` and has no other arguments; None for any other node."""
    return (node.args[0], node.args[1]) if _op(node) == op and len(node.args) == 2 and not node.kwargs else None


def _bare(node: Any, inside: set[Node]) -> Any:
    """Return the value that `node` has before fp32-to-fp32 conversions. Add these conversions to `inside`, the nodes to replace."""
    while _op(node) in CONVERSIONS and _is_fp32(node) and _is_fp32(node.args[0]):
        inside.add(node)
        node = node.args[0]
    return node


def _factors(node: Any, inside: set[Node], top: bool = True) -> list[Any]:
    """Return the factors of a product as numbers and nodes, and add the nodes of the product to `inside`, the nodes to replace.

    For example, x³ gives [x, x, x], and 0.5 * a / √v gives [0.5, a, ("rsqrt", v)]. A value that is no product is one factor. A factor that
    is itself a product is split, too, unless it has several readers. `top` is True for the outermost product, which is always split.
    """
    node = _bare(node, inside)
    if not isinstance(node, Node) or (not top and len(node.users) > 1 and _op(node) in ("mul", "div")):
        return [node]
    pair, quotient = _two(node, "mul"), _two(node, "div")
    if pair is not None:
        inside.add(node)
        return [factor for part in pair for factor in _factors(part, inside, False)]
    if quotient is not None and _op(_bare(quotient[1], inside)) == "sqrt":
        root = _bare(quotient[1], inside)
        inside |= {node, root}
        return [*_factors(quotient[0], inside, False), ("rsqrt", root.args[0])]
    if _op(node) == "rsqrt":
        inside.add(node)
        return [("rsqrt", node.args[0])]
    power = {"square": 2, "pow": _argument(node, 1, "exponent")}.get(_op(node)) if _op(node) in ("square", "pow") else None
    if power in (2, 3):
        inside.add(node)
        return [_bare(node.args[0], inside)] * int(power)
    return [node]


def _number(factors: list[Any], like: float) -> bool:
    """True if the product of the plain numbers in `factors` is `like`, up to rounding."""
    return math.isclose(math.prod(f for f in factors if isinstance(f, int | float)), like, rel_tol=1e-5)


def _nodes(factors: list[Any]) -> list[Any]:
    """Return the factors that are not plain numbers."""
    return [factor for factor in factors if not isinstance(factor, int | float)]


def _plus(node: Any, inside: set[Node]) -> tuple[float, Any] | None:
    """If `node` adds a number and a node, return (number, node) and add the sum to `inside`, the nodes to replace; otherwise None."""
    pair = _two(_bare(node, inside), "add")
    if pair is None:
        return None
    number, other = pair if isinstance(pair[0], int | float) else pair[::-1]
    if not isinstance(number, int | float) or not isinstance(other, Node):
        return None
    inside.add(_bare(node, inside))
    return float(number), other


def _mean_over_last(node: Any, inside: set[Node]) -> Any:
    """If `node` is a mean over the last dim (keepdim=True), add it to `inside`, the nodes to replace. Return its operand, or None."""
    node = _bare(node, inside)
    if _op(node) != "mean" or node.kwargs.get("dtype") is not None or _argument(node, 2, "keepdim") is not True:
        return None
    dim = _argument(node, 1, "dim")
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if dim not in (-1, example_value(node).dim() - 1):
        return None
    inside.add(node)
    return node.args[0]


def _same(a: Any, b: Any, inside: set[Node]) -> bool:
    """True if `a` and `b` are the same node once fp32-to-fp32 conversions are skipped. Add these to `inside`, the nodes to replace."""
    return isinstance(a, Node) and _bare(a, inside) is _bare(b, inside)


# -- the patterns -------------------------------------------------------------------------------
def _gelu(end: Node) -> Pattern | None:
    """Return the pattern of GELU's tanh form that ends at a node; None if there is none."""
    inside: set[Node] = set()
    factors = _factors(end, inside)
    nodes = _nodes(factors)
    if len(nodes) != 2 or not _number(factors, 0.5):
        return None
    for x, gate in (nodes, nodes[::-1]):
        tried = set(inside)
        one = _plus(gate, tried) if isinstance(gate, Node) and _is_fp32(x) else None
        if one is None or one[0] != 1 or _op(one[1]) != "tanh":
            continue
        tried.add(one[1])
        if _is_tanh_argument(one[1].args[0], x, tried):
            return Pattern(end, "gelu", F.gelu, (x,), {"approximate": "tanh"}, tried)
    return None


def _is_tanh_argument(node: Any, x: Node, inside: set[Node]) -> bool:
    """True if `node` is √(2/π) (x + 0.044715 x³), or √(2/π) x (1 + 0.044715 x²).

    The nodes of this expression are added to `inside`, the nodes to replace.
    """
    factors = _factors(node, inside)
    nodes = _nodes(factors)
    if not _number(factors, math.sqrt(2 / math.pi)):
        return False
    if len(nodes) == 1:
        pair = _two(nodes[0], "add")
        if pair is None or not any(_same(part, x, inside) for part in pair):
            return False
        inside.add(nodes[0])
        cubic = _factors(pair[1] if _same(pair[0], x, inside) else pair[0], inside)
        return _number(cubic, 0.044715) and len(_nodes(cubic)) == 3 and all(_same(n, x, inside) for n in _nodes(cubic))
    if len(nodes) != 2 or not any(_same(n, x, inside) for n in nodes):
        return False
    one = _plus(next((n for n in nodes if not _same(n, x, inside)), None), inside)
    square = _factors(one[1], inside) if one is not None and one[0] == 1 else []
    return _number(square, 0.044715) and len(_nodes(square)) == 2 and all(_same(n, x, inside) for n in _nodes(square))


def _softmax(end: Node) -> Pattern | None:
    """Return the pattern of a softmax that ends at a node; None if there is none."""
    pair = _two(end, "div")
    if pair is None or _op(pair[0]) != "exp" or _op(pair[1]) != "sum" or pair[1].args[0] is not pair[0]:
        return None
    power, total = pair
    dim = _argument(total, 1, "dim")
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if not isinstance(dim, int) or _argument(total, 2, "keepdim") is not True or total.kwargs.get("dtype") is not None:
        return None
    inside, x = {power, total}, power.args[0]
    shifted = _two(x, "sub")
    largest = _largest(shifted[1], dim) if shifted is not None else None
    if shifted is not None and largest is not None and largest[-1].args[0] is shifted[0]:
        inside |= {x, *largest}
        x = shifted[0]
    return Pattern(end, "softmax", F.softmax, (x, dim), {}, inside) if _is_fp32(x) else None


def _largest(node: Any, dim: int) -> list[Node] | None:
    """If `node` is x.amax(dim, keepdim=True) or x.max(dim, keepdim=True)[0], return its nodes, from last to first; otherwise None."""
    found = []
    while _op(node) == "detach" or (_op(node) == "getitem" and node.args[1] == 0):
        found.append(node)
        node = node.args[0]
    if _op(node) not in ("amax", "max") or _argument(node, 2, "keepdim") is not True:
        return None
    asked = _argument(node, 1, "dim")
    asked = asked[0] if isinstance(asked, tuple | list) and len(asked) == 1 else asked
    return [*found, node] if asked == dim else None


def _scaled(factors: list[Any], width: Any) -> tuple[Any, Any, Any] | None:
    """Return (x, v, weight) if `factors` form a norm, x · 1/√v · weight, otherwise None. `weight` has `width` elements, or is None."""
    roots = [f[1] for f in factors if isinstance(f, tuple)]
    others = [f for f in factors if isinstance(f, Node)]
    if len(roots) != 1 or len(roots) + len(others) != len(factors):
        return None
    wide = [f for f in others if _is_row(f, width)]
    values = [f for f in others if f not in wide]
    if len(values) != 1 or len(wide) > 1:
        return None
    return values[0], roots[0], wide[0] if wide else None


def _layer_norm(end: Node) -> Pattern | None:
    """Return the pattern of a layer norm that ends at a node; None if there is none."""
    inside: set[Node] = set()
    width = _width(end)
    pair, bias, product = _two(end, "add"), None, end
    if pair is not None:
        biased = [both for both in (pair, pair[::-1]) if _is_row(both[1], width)]
        if not biased:
            return None
        product, bias = biased[0]
    parts = _scaled(_factors(product, inside, pair is None), width)
    if parts is None or width is None:
        return None
    centred, root, weight = parts
    difference, spread = _two(_bare(centred, inside), "sub"), _plus(root, inside)
    if difference is None or spread is None or not _same(_mean_over_last(difference[1], inside), difference[0], inside):
        return None
    inside.add(_bare(centred, inside))
    x = _bare(difference[0], inside)
    if not _is_variance(spread[1], x, centred, inside) or (bias is not None and weight is None) or not _as_wide(x, end):
        return None
    return Pattern(end, "layer_norm", F.layer_norm, (x, (width,), weight, bias, spread[0]), {}, inside)


def _is_variance(node: Any, x: Node, centred: Node, inside: set[Node]) -> bool:
    """True if `node` is the biased variance of x over the last dim, by `var` or as the mean of the squares of `centred`.

    The nodes of the variance are added to `inside`, the nodes to replace.
    """
    node = _bare(node, inside)
    if _op(node) == "var":
        biased = node.kwargs.get("unbiased") is False or node.kwargs.get("correction") == 0 or node.args[2:3] == (False,)
        dim = _argument(node, 1, "dim")
        inside.add(node)
        return biased and dim in (-1, (-1,), [-1]) and node.kwargs.get("keepdim") is True and _same(node.args[0], x, inside)
    squares = _mean_over_last(node, inside)
    factors = _factors(squares, inside) if isinstance(squares, Node) else []
    return len(factors) == 2 and all(_same_difference(f, centred, inside) for f in factors)


def _same_difference(a: Any, b: Node, inside: set[Node]) -> bool:
    """True if `a` and `b` are the same node, or two subtractions of the same operands. Conversions from fp32 to fp32 are skipped.

    `inside` collects the nodes that the fused op replaces. It gets the skipped conversions, and `a` if `a` and `b` are two nodes.
    """
    if _same(a, b, inside):
        return True
    one, other = _two(_bare(a, inside), "sub"), _two(_bare(b, inside), "sub")
    if one is None or other is None or not all(_same(left, right, inside) for left, right in zip(one, other, strict=True)):
        return False
    inside.add(_bare(a, inside))
    return True


def _rms_norm(end: Node) -> Pattern | None:
    """Return the pattern of an RMS norm that ends at a node; None if there is none."""
    inside: set[Node] = set()
    width = _width(end)
    parts = _scaled(_factors(end, inside), width)
    spread = _plus(parts[1], inside) if parts is not None else None
    squares = _mean_over_last(spread[1], inside) if spread is not None else None
    if parts is None or width is None or spread is None or not isinstance(squares, Node):
        return None
    x, factors = _bare(parts[0], inside), _factors(squares, inside)
    if len(factors) != 2 or not all(_same(f, x, inside) for f in factors) or not _as_wide(x, end):
        return None
    return Pattern(end, "rms_norm", F.rms_norm, (x, (width,), parts[2], spread[0]), {}, inside)


def _is_row(node: Any, width: int) -> bool:
    """True if `node` is an fp32 tensor with one dim, of `width` elements, as the weight and the bias of a norm are."""
    return _is_fp32(node) and tuple(map(comparable, example_value(node).shape)) == (width,)


def _as_wide(x: Any, end: Node) -> bool:
    """True if the operand `x` of a norm is fp32 and its last dim is as large as that of the result `end`: no weight broadcasts x."""
    return _is_fp32(x) and comparable(_width(x)) == comparable(_width(end))


def _width(node: Node) -> Any:
    """Return the size of the last dim of a node's value; None if the size is symbolic or the value has no dim."""
    shape = example_value(node).shape
    return shape[-1] if len(shape) and isinstance(shape[-1], int) else None


_PRODUCTS = CONVERSIONS | ops_with(Trait.SCALES)
_PATTERNS: tuple[tuple[Match, Set[str], tuple[str, ...]], ...] = (
    (_gelu, _PRODUCTS, ("tanh",)),
    (_softmax, {"div"}, ("exp", "sum")),
    (_layer_norm, _PRODUCTS | {"add"}, ("mean", "sub")),
    (_rms_norm, _PRODUCTS, ("mean",)),
)
"""(function that finds a pattern, ops with which the pattern may end, ops without which a graph cannot contain it)."""
