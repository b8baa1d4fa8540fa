"""What leaves a graph must be one fp32 value for the graph and for its caller: in number, memory and gradient.

A low value that is returned is cast. If others go on reading the low value, the cast stands beside their path: the caller's gradient
with respect to the result misses them. And two results that share memory become two casts, which share none.
So before a graph is read, an idle `x.to(x.dtype)` is put behind the value, and all its other readers read that. In the captured graph
it gives `x` itself. Coloured high, it is the place where the cast stands, on everybody's path:

    before   y = linear(x); z = relu(y); return y, z
    after    y = linear(x); to = y.to(float32); z = relu(to); return to, z

1. *Memory.* If two results share memory, or the elements of one do, or a result shares it with an input, or a body writes it, such a
   node follows the maker of the memory. The views that lead from it to the results run high, and all that may write it. If the
   maker gives a view of a hidden tensor, as `linear` does of more than two dims, so does the node: autograd takes a view
   off the path of what is written beside it, and a base not. In graphs with gradients the same holds if a result is the very
   tensor that an op was given, as that of `contiguous` may be, and others read that, or it has hooks: they are on the result's path. Or
   gradients were recorded where it was made, and are not where it is given back.
2. *Values*, in graphs with gradients. If a result is read by others as well, such a node follows it. If it shares memory that the
   graph writes, rule 1 applies. If a result has hooks, the node stands before them: the hooks are then on what the caller gets.
3. *Second derivatives*, in graphs with gradients. If the backward of a result's op reads the result, as that of `tanh` does, a
   second backward gives the result a gradient. So the op itself runs high, and what it gives is what leaves.

By name it knows `detach`, past which no gradient comes.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import (
    LEAVES,
    READ_BACK,
    RETURNED,
    SHARED,
    differentiable,
    example_value,
    is_opaque,
    memory_of,
    tensors,
    transform_regions,
    written,
)
from amprewrite.graphs.fx.ops.tensor_hooks import hooked
from amprewrite.graphs.fx.read.aliasing import is_view, made_inside, reads_back, same_tensor
from amprewrite.graphs.fx.run.repeated_calls import Alike
from amprewrite.tables.ops.op_lists import Trait, find_op, op_name, ops_with
from amprewrite.tables.vocabulary import OpKind
from amprewrite.torch_internals.dispatch import is_wrapped_by_transform

Node = torch.fx.Node
_STOP = ops_with(Trait.STOPS_GRADIENT)


def mark_leaving(module: torch.fx.GraphModule, copy: Callable[..., Any], without_grad: set[Node] | None) -> torch.fx.GraphModule:
    """Mark in a copy of `module` what leaves as itself; `module` itself if nothing does. `copy` gives (copy, {node: its copy}).

    `without_grad` are the nodes that run without gradients; None says that all do.
    """
    memory = Memory(module.graph, without_grad or set())
    shared = memory.leaving(with_gradients=without_grad is not None)
    regions = transform_regions(module.graph)  # no border can stand inside, and what they give runs high as it is
    chains = {node for storage in shared for node in memory.chain(storage) if node not in regions}
    makers = dict.fromkeys(maker for storage in shared if (maker := memory.maker(storage)) is not None)
    own: set[Node] = set()
    if without_grad is not None:
        left = dict.fromkeys((*map(_before_hooks, read_results(module.graph)), *_hooked_results(module.graph)))
        makers |= dict.fromkeys(node for node in left if node not in chains and node not in without_grad)
        own = {op for node in read_results_back(module.graph, without_grad) for op in _op_of(node)}
        makers = {maker: None for maker in makers if maker not in own}
    if not makers and not chains and not own:
        return module
    copied, copy_of = copy(module)
    for node in own - chains:
        copy_of[node].meta[LEAVES] = READ_BACK
    for node in chains:
        copy_of[node].meta[LEAVES] = SHARED
    inside = transform_regions(copied.graph)
    for maker in makers:
        followed = _follow(copied.graph, copy_of[maker], inside)
        if without_grad is not None and memory_of(maker) & set(shared) and is_view(maker):
            _view(copied.graph, followed)
    copied.recompile()
    marked: torch.fx.GraphModule = copied
    return marked


def read_results_back(graph: torch.fx.Graph, without_grad: Set[Node]) -> Iterator[Node]:
    """Results with gradients that the backward of their own op reads; heavy ops have no second derivative, or do not read them.

    What leaves a transform of torch.func is none: no border can stand inside, and what the ops in there read is another tensor.
    """
    apart, alike, known = transform_regions(graph), Alike(), dict[Hashable, bool]()
    for node in dict.fromkeys(map(_before_hooks, _results(graph))):
        if node in without_grad or not differentiable(example_value(node)) or _op_of(node)[-1] in apart:
            continue
        op = _maker(node)
        key = alike.key(op) or op  # the keys and values of all layers are made by calls that are alike
        if key not in known:
            known[key] = _is_read_back(op)
        if known[key]:
            yield node


def _maker(result: Node) -> Node:
    """The op behind `result`. A checkpoint is no op: the one in its body counts."""
    inside = made_inside(result)
    return _op_of(result)[-1] if inside is None else _maker(_before_hooks(inside))


def _is_read_back(op: Node) -> bool:
    """Whether the backward of an op reads what it gives."""
    row = find_op(op_name(op.target))
    heavy = row is not None and row.kind is OpKind.ALLOW
    return op.op not in ("placeholder", "get_attr") and not heavy and reads_back(op)


def _op_of(node: Node) -> tuple[Node, ...]:
    """`node`, and the op that it picks a result of."""
    source = node.args[0] if node.target is operator.getitem else None
    picked = isinstance(source, Node) and not isinstance(example_value(source), torch.Tensor)
    return (node, source) if picked and isinstance(source, Node) else (node,)


def _inside_transforms(graph: torch.fx.Graph) -> set[Node]:
    """Nodes whose values exist inside a torch.func transform alone. What leaves it is a plain tensor.

    Another transform may read a wrapped one, as that of `jacrev` around its backward does.
    """
    regions = transform_regions(graph)
    return {node for node, region in regions.items() if _wrapped(node) or all(regions.get(user) == region for user in node.users)}


def _wrapped(node: Node) -> bool:
    return any(map(is_wrapped_by_transform, tensors(example_value(node))))


def _follow(graph: torch.fx.Graph, maker: Node, regions: Mapping[Node, Node]) -> Node:
    """The idle conversion, put behind `maker` or behind the transform of `regions` that it leaves; all others read it."""
    place, region = maker, regions.get(maker)
    readers = [reader for reader in maker.users if region is None or regions.get(reader) != region]
    while region is not None and regions.get(place.next) == region:
        place = place.next
    with graph.inserting_after(place):
        node = graph.call_method("to", (maker, example_value(maker).dtype))
    node.meta = {**maker.meta, LEAVES: RETURNED}
    maker.meta.pop(LEAVES, None)
    for reader in readers:
        reader.replace_input_with(maker, node)
    return node


def _view(graph: torch.fx.Graph, node: Node) -> None:
    """Put a view of all of `node` behind it, which all others read."""
    readers = list(node.users)
    with graph.inserting_after(node):
        whole = graph.call_method("view_as", (node, node))
    whole.meta = {**node.meta, LEAVES: SHARED}
    for reader in readers:
        reader.replace_input_with(node, whole)


def read_results(graph: torch.fx.Graph) -> Iterator[Node]:
    """Results that may have a gradient and that other ops read with one; what the graph itself takes gradients of counts as well."""
    apart = _inside_transforms(graph)
    asked = (node for call in graph.find_nodes(op="call_function", target=torch.autograd.grad) for node in call.all_input_nodes)
    for node in dict.fromkeys((*_results(graph), *asked)):
        made = node.op not in ("placeholder", "get_attr") and node not in apart and differentiable(example_value(node))
        if made and any(user.op != "output" and _takes_gradient(user) for user in node.users):
            yield node


def _hooked_results(graph: torch.fx.Graph) -> Iterator[Node]:
    """Makers of results that have hooks: the caller's `retain_grad` sees the gradient behind them, so they stand on what leaves."""
    for node in _results(graph):
        maker = _before_hooks(node)
        if maker is not node and maker.op not in ("placeholder", "get_attr") and differentiable(example_value(node)):
            yield maker


def _before_hooks(node: Node) -> Node:
    """The value that `node` is with the hooks on it."""
    while node.target is hooked:
        (node,) = node.all_input_nodes[:1]
    return node


def _takes_gradient(reader: Node) -> bool:
    """Whether a gradient may come from `reader`: not from indices, comparisons and sizes."""
    if op_name(reader.target) in _STOP:
        return False
    if any(differentiable(t) for t in tensors(example_value(reader))):
        return True
    return bool(written(reader)) or is_opaque(reader) or reader.target is torch.autograd.grad


def _results(graph: torch.fx.Graph) -> list[Node]:
    return next(node for node in graph.nodes if node.op == "output").all_input_nodes


def _read_as_another(result: Node, without_grad: Set[Node]) -> bool:
    """Whether a result is the very tensor that an op was given, and others read that one, as the body of a checkpoint may, or it has hooks.

    So is one that was made with gradients and given back where there are none.
    """
    result = _before_hooks(result)
    while (given := same_tensor(result)) is not None:
        elsewhere = result in without_grad and given not in without_grad
        inside = made_inside(result) is not None or made_inside(given) is not None
        if len(given.users) > 1 or given.target is hooked or inside or elsewhere:
            return True
        result = _before_hooks(given)
    return False


def _overlaps(value: Any) -> bool:
    """Whether elements of a tensor share memory with one another, as those of an expanded one do."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return any(isinstance(stride, int) and stride == 0 and size != 1 for size, stride in zip(value.shape, value.stride(), strict=True))


class Memory:
    """Which nodes of a graph lie in which memory."""

    def __init__(self, graph: torch.fx.Graph, without_grad: Set[Node] = frozenset()) -> None:
        self.holders: dict[int, list[Node]] = defaultdict(list)
        self.seen_otherwise: dict[int, set[Node]] = defaultdict(set)
        """Nodes that read the memory as integers, between views as floats."""
        self.results, self.inputs, self.written, self.written_inside = set[int](), set[int](), set[int](), set[int]()
        self.last_write: dict[int, int] = {}
        self.position = {node: position for position, node in enumerate(graph.nodes)}
        self.sinks: set[Node] = set()
        apart = _inside_transforms(graph)
        for node in graph.nodes:
            for target in written(node):
                for storage in memory_of(target):
                    self.written.add(storage)
                    self.last_write[storage] = self.position[node]
                    if is_opaque(node):
                        self.written_inside.add(storage)
                        self.sinks.add(target)
            if node.op == "output":
                continue
            if not any(differentiable(t) for t in tensors(example_value(node))):
                for storage in memory_of(node):
                    self.seen_otherwise[storage].add(node)
                continue
            for storage in memory_of(node):
                if node.op in ("placeholder", "get_attr"):
                    self.inputs.add(storage)
                if node not in apart:
                    self.holders[storage].append(node)
        found = _results(graph)
        self.sinks |= set(found)
        counted: dict[int, int] = defaultdict(int)
        for result in found:
            for storage in memory_of(result):
                self.results.add(storage)
                counted[storage] += 1
                counted[storage] += _overlaps(example_value(result))
        self.several = {storage for storage, count in counted.items() if count > 1}
        self.same = {storage for result in found if _read_as_another(result, without_grad) for storage in memory_of(result)}

    def leaving(self, with_gradients: bool) -> list[int]:
        """The storages that leave as themselves: two results share them, or a result and an input, or they are written."""
        found = self.several | (self.results & self.inputs) | self.written_inside
        if with_gradients:
            found |= (self.results & self.written) | (self.inputs & self.written) | self.same
        return sorted((storage for storage in found if storage in self.holders), key=lambda s: self.position[self.holders[s][0]])

    def maker(self, storage: int) -> Node | None:
        """The node whose result the memory is; None if it comes from outside, or if several results of one op lie in it."""
        if storage in self.inputs:
            return None
        first = self.holders[storage][0]
        if isinstance(example_value(first), torch.Tensor):
            return first
        parts = [node for node in self.holders[storage] if first in node.all_input_nodes]
        return parts[0] if len(parts) == 1 and isinstance(example_value(parts[0]), torch.Tensor) else None

    def chain(self, storage: int) -> set[Node]:
        """The nodes that lead to the results in this memory, and all that may write it; its maker is none of them."""
        maker = self.maker(storage)
        made = -1 if maker is None else self.position[maker]
        holders = {node for node in self.holders[storage] if self.position[node] > made}
        between = {node for node in self.seen_otherwise[storage] if self.position[node] > made}
        found: set[Node] = set()
        waiting = [node for node in holders if node in self.sinks]
        if storage in self.written:
            waiting += [node for node in holders if self.position[node] <= self.last_write[storage]]
        while waiting:
            node = waiting.pop()
            if node not in found and node.op not in ("placeholder", "get_attr"):
                found.add(node)
                waiting += [feeder for feeder in node.all_input_nodes if feeder in holders or feeder in between]
        return found & holders


__all__ = ["mark_leaving", "read_results"]
