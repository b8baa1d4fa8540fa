"""Values that leave a graph: each must be one fp32 value for the graph and for its caller, in numbers, memory and gradient.

A low value that is returned is cast. If other ops read the low value, the cast is not on their path: the caller's gradient with respect to
the result misses them. And two results that share memory become two casts, which share none. So before a graph is read, an idle
`x.to(x.dtype)` is inserted after the value, and all its other readers read that. In the captured graph it returns `x` itself. Coloured
high, it is the cast on every reader's path:

    before   y = linear(x); z = relu(y); return y, z
    after    y = linear(x); to = y.to(float32); z = relu(to); return to, z

1. *Memory.* Two results may share memory, or elements of one result may, a result may share it with an input, or a body may write to it.
   Then such a node follows the maker of the memory. The views from it to the results run high, and so do all ops that may write to it. If
   the maker returns a view of a hidden tensor, as `linear` with more than two dims does, so does the node: after an in-place write,
   autograd treats a view and a base differently. In graphs with gradients the same holds if a result is the very tensor that an op was
   given, as with `contiguous`, and other ops read that tensor, or it has hooks: both are on the result's path. It also holds if gradients
   were recorded where the tensor was made and are not where it is returned.
2. *Values*, in graphs with gradients. If a result has other readers, such a node follows it. If it shares memory that the graph writes,
   rule 1 applies. If a result has hooks, the node precedes them, so that the hooks are on the tensor that the caller gets.
3. *Second derivatives*, in graphs with gradients. If the backward of a result's op reads the result, as `tanh` does, a second backward
   gives the result a gradient. So the op itself runs high, and its own result is returned.

By name it knows `detach`, which stops gradients.
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
    """Mark the values that leave a graph in a copy of `module`; return `module` itself if there are none.

    `copy` returns (copy, {node: its copy}). `without_grad` are the nodes that run without gradients; None says that all do.
    """
    memory = Memory(module.graph, without_grad or set())
    shared = memory.leaving(with_gradients=without_grad is not None)
    regions = transform_regions(module.graph)  # no border fits inside, and results run high without one
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
    """Results with gradients that the backward of their own op reads. Heavy ops have no second derivative, or do not read their results.

    A value that leaves a torch.func transform is left out: no border fits inside, and the ops there read another tensor.
    """
    apart, alike, known = transform_regions(graph), Alike(), dict[Hashable, bool]()
    for node in dict.fromkeys(map(_before_hooks, _results(graph))):
        if node in without_grad or not differentiable(example_value(node)) or _op_of(node)[-1] in apart:
            continue
        op = _maker(node)
        key = alike.key(op) or op  # all layers make their keys and values by like calls: one answer serves all
        if key not in known:
            known[key] = _is_read_back(op)
        if known[key]:
            yield node


def _maker(result: Node) -> Node:
    """The op that makes `result`. For a result of a checkpoint, the op in its body."""
    inside = made_inside(result)
    return _op_of(result)[-1] if inside is None else _maker(_before_hooks(inside))


def _is_read_back(op: Node) -> bool:
    """True if the backward of an op reads the op's result."""
    row = find_op(op_name(op.target))
    heavy = row is not None and row.kind is OpKind.ALLOW
    return op.op not in ("placeholder", "get_attr") and not heavy and reads_back(op)


def _op_of(node: Node) -> tuple[Node, ...]:
    """`node`, and the op of which it picks a result."""
    source = node.args[0] if node.target is operator.getitem else None
    picked = isinstance(source, Node) and not isinstance(example_value(source), torch.Tensor)
    return (node, source) if picked and isinstance(source, Node) else (node,)


def _inside_transforms(graph: torch.fx.Graph) -> set[Node]:
    """Nodes whose values exist only inside a torch.func transform. A value that leaves the transform is a plain tensor.

    Another transform may read a wrapped one: `jacrev` does so around its backward.
    """
    regions = transform_regions(graph)
    return {node for node, region in regions.items() if _wrapped(node) or all(regions.get(user) == region for user in node.users)}


def _wrapped(node: Node) -> bool:
    return any(map(is_wrapped_by_transform, tensors(example_value(node))))


def _follow(graph: torch.fx.Graph, maker: Node, regions: Mapping[Node, Node]) -> Node:
    """Insert the idle conversion after `maker`, or after the transform of `regions` that it leaves, and let all other readers read it."""
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
    """Insert a view of all of `node` after it, and let all other readers read that."""
    readers = list(node.users)
    with graph.inserting_after(node):
        whole = graph.call_method("view_as", (node, node))
    whole.meta = {**node.meta, LEAVES: SHARED}
    for reader in readers:
        reader.replace_input_with(node, whole)


def read_results(graph: torch.fx.Graph) -> Iterator[Node]:
    """Results through whose other readers a gradient may flow. Values that the graph itself differentiates count as well."""
    apart = _inside_transforms(graph)
    asked = (node for call in graph.find_nodes(op="call_function", target=torch.autograd.grad) for node in call.all_input_nodes)
    for node in dict.fromkeys((*_results(graph), *asked)):
        made = node.op not in ("placeholder", "get_attr") and node not in apart and differentiable(example_value(node))
        if made and any(user.op != "output" and _takes_gradient(user) for user in node.users):
            yield node


def _hooked_results(graph: torch.fx.Graph) -> Iterator[Node]:
    """Makers of results with hooks: `retain_grad` of the caller sees the gradient after the hooks, so they belong on the returned value."""
    for node in _results(graph):
        maker = _before_hooks(node)
        if maker is not node and maker.op not in ("placeholder", "get_attr") and differentiable(example_value(node)):
            yield maker


def _before_hooks(node: Node) -> Node:
    """The value without the hooks on it."""
    while node.target is hooked:
        (node,) = node.all_input_nodes[:1]
    return node


def _takes_gradient(reader: Node) -> bool:
    """True if a gradient may flow back through `reader`: not through indices, comparisons or sizes."""
    if op_name(reader.target) in _STOP:
        return False
    if any(differentiable(t) for t in tensors(example_value(reader))):
        return True
    return bool(written(reader)) or is_opaque(reader) or reader.target is torch.autograd.grad


def _results(graph: torch.fx.Graph) -> list[Node]:
    return next(node for node in graph.nodes if node.op == "output").all_input_nodes


def _read_as_another(result: Node, without_grad: Set[Node]) -> bool:
    """True if a result is a tensor that an op was given, and that tensor has other readers or hooks, or is of a checkpoint's body.

    Also true for a tensor that was made with gradients and is returned where there are none.
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
    """True if elements of a tensor share memory with one another, as in an expanded tensor."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return any(isinstance(stride, int) and stride == 0 and size != 1 for size, stride in zip(value.shape, value.stride(), strict=True))


class Memory:
    """The nodes of a graph by the memory of their results."""

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
        """Storages whose values must leave as one tensor: several results share them, or a result and an input do, or they are written."""
        found = self.several | (self.results & self.inputs) | self.written_inside
        if with_gradients:
            found |= (self.results & self.written) | (self.inputs & self.written) | self.same
        return sorted((storage for storage in found if storage in self.holders), key=lambda s: self.position[self.holders[s][0]])

    def maker(self, storage: int) -> Node | None:
        """The node that makes the memory; None if it is from outside, or if several results of one op share it."""
        if storage in self.inputs:
            return None
        first = self.holders[storage][0]
        if isinstance(example_value(first), torch.Tensor):
            return first
        parts = [node for node in self.holders[storage] if first in node.all_input_nodes]
        return parts[0] if len(parts) == 1 and isinstance(example_value(parts[0]), torch.Tensor) else None

    def chain(self, storage: int) -> set[Node]:
        """The nodes that lead to the results in this memory, and all nodes that may write to it, without its maker."""
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
