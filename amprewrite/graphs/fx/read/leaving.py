"""Mark the values that a graph returns, so that the graph and its caller use the same fp32 tensor, with one memory and one gradient.

A low value that is returned must be cast to fp32. If ops in the graph read the low value instead of the cast, the caller's gradient with
respect to the result lacks the part of these ops. If two results share memory, their casts would not share it. So before a graph is read,
an *idle conversion* `x.to(x.dtype)` is inserted after such a value x, and all other readers of x then read the conversion. In the captured
graph the conversion returns `x` itself. Every plan runs it in fp32, so in the edited graph it is the cast to fp32 for all these readers:

    before   y = linear(x); z = relu(y); return y, z
    after    y = linear(x); to = y.to(float32); z = relu(to); return to, z

1. *Memory.* The idle conversion follows the op that makes the memory, its *maker*, in each of these cases:
   - Several results, or elements of one result, share memory.
   - A result shares memory with an input, or a body graph writes to the memory.
   - In graphs with gradients: the graph writes to the memory of a result or an input.
   - In graphs with gradients: an op returns its operand itself (as `contiguous` may), the graph returns this result, and in addition the
     operand has other readers or hooks, one of the two is a result of a checkpoint, or only the op runs without gradients.
   The views that lead from the maker to the results run in fp32, and so do all ops that may write to the memory. If the maker returns a
   view of a tensor inside the op, as `linear` with more than two dims does, a view follows the conversion, because autograd treats a view
   and a base differently after an in-place write. No view follows a result of a checkpoint whose body reads it (`_may_be_viewed` says why).
2. *Values*, in graphs with gradients. If ops in the graph read a result, the idle conversion follows the result, unless rule 1 applies. If
   a value has hooks, they are set after the conversion. So they get its whole gradient in fp32, and belong to the tensor the caller gets.
3. *Second derivatives*, in graphs with gradients. If the backward of an op reads the op's result, as for `tanh`, a second backward gives
   the result a gradient. If the graph returns such a result, the op itself runs in fp32 and gets no idle conversion.

This file has special code for `detach`, which stops gradients.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
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
    sized,
    tensors,
    transform_regions,
    written,
)
from amprewrite.graphs.fx.ops.scale_ops import hooked
from amprewrite.graphs.fx.read.aliasing import is_view, made_inside, reads_back, same_tensor
from amprewrite.graphs.fx.run.repeated_calls import Answers
from amprewrite.ir.op_graph import reached
from amprewrite.tables.ops.op_lists import Trait, find_op, op_name, ops_with
from amprewrite.tables.vocabulary import OpKind
from amprewrite.torch_internals.dispatch import is_wrapped_by_transform

Node = torch.fx.Node
_STOP = ops_with(Trait.STOPS_GRADIENT)


def mark_leaving(graph: torch.fx.Graph, make_own: Callable[[], Callable[[Node], Node]], without_grad: set[Node] | None) -> bool:
    """Make a graph and its caller use the same fp32 tensor for each result: insert no-op conversions, and mark nodes that must be fp32.

    Return False, without any change, if no node needs this. The edits are made in a copy of the graph: `make_own` copies the graph
    and returns a function from each node to its copy. A mark is the reason for fp32, under the key LEAVES in the meta of a node.
    `without_grad` are the nodes that run without gradients; with None, the rules for graphs with gradients do not apply.
    """
    memory = Memory(graph, without_grad or set())
    shared = memory.leaving(with_gradients=without_grad is not None)
    regions = transform_regions(graph)  # leave out nodes inside torch.func transforms: no cast can be inserted there
    chains = {node for storage in shared for node in memory.chain(storage) if node not in regions}
    makers = dict.fromkeys(maker for storage in shared if (maker := memory.maker(storage)) is not None)
    own: set[Node] = set()
    if without_grad is not None:
        left = dict.fromkeys((*map(_before_hooks, read_results(graph)), *_hooked_values(graph, memory, regions)))
        makers |= dict.fromkeys(node for node in left if node not in chains and node not in without_grad)
        own = {op for node in read_results_back(graph, without_grad) for op in _op_of(node)}
        makers = {maker: None for maker in makers if maker not in own}
    if not makers and not chains and not own:
        return False
    viewed = {maker for maker in makers if without_grad is not None and memory_of(maker) & set(shared) and _may_be_viewed(maker)}
    copy_of = make_own()
    for node in own - chains:
        copy_of(node).meta[LEAVES] = READ_BACK
    for node in chains:
        copy_of(node).meta[LEAVES] = SHARED
    inside = {copy_of(node): copy_of(region) for node, region in regions.items()}
    for maker in makers:
        copied = copy_of(maker)
        followed = _follow(copied.graph, copied, inside)
        if maker in viewed:
            _view(copied.graph, followed)
    return True


def _may_be_viewed(maker: Node) -> bool:
    """True if `maker` returns a view, and another view may be inserted after it.

    False for a checkpoint's result if an op in the body reads it, too: the gradient of the new view would lack the part of this op.
    """
    inside = made_inside(maker)
    return is_view(maker) and (inside is None or all(user.op == "output" for user in inside.users))


def read_results_back(graph: torch.fx.Graph, without_grad: Set[Node]) -> Iterator[Node]:
    """Yield the results of the graph that get gradients and that the backward of their own op reads, as for `tanh`.

    Ops on the allow list, such as matmul and attention, are left out: their backward has no derivative, or does not read the result. Ops
    inside a torch.func transform are left out, too: no cast can be inserted there, and the ops inside do not read the caller's tensor.
    """
    apart, read_back = transform_regions(graph), Answers(_is_read_back, sized)
    for node in dict.fromkeys(map(_before_hooks, _results(graph))):
        if node in without_grad or not differentiable(example_value(node)) or _op_of(node)[-1] in apart:
            continue
        if read_back(_maker(node)):
            yield node


def _maker(result: Node) -> Node:
    """Return the op that makes `result`; for a result of a checkpoint, the op in the body graph."""
    inside = made_inside(result)
    return _op_of(result)[-1] if inside is None else _maker(_before_hooks(inside))


def _is_read_back(op: Node) -> bool:
    """True if the backward of `op` reads the op's result. False for ops on the allow list (`read_results_back` gives the reason)."""
    row = find_op(op_name(op.target))
    heavy = row is not None and row.kind is OpKind.ALLOW
    return op.op not in ("placeholder", "get_attr") and not heavy and reads_back(op)


def _op_of(node: Node) -> tuple[Node, ...]:
    """Return (`node`,), or (`node`, its op) if `node` picks one of several results of an op."""
    source = node.args[0] if node.target is operator.getitem else None
    picked = isinstance(source, Node) and not isinstance(example_value(source), torch.Tensor)
    return (node, source) if picked and isinstance(source, Node) else (node,)


def _inside_transforms(graph: torch.fx.Graph) -> set[Node]:
    """Return the nodes whose values exist only inside a torch.func transform, such as vmap.

    These are the nodes that only ops of the same transform read, and the nodes whose tensor is wrapped by a transform. In `jacrev`, another
    transform reads a wrapped tensor.
    """
    regions = transform_regions(graph)
    wrapped = {node for node in regions if any(map(is_wrapped_by_transform, tensors(example_value(node))))}
    return wrapped | {node for node, region in regions.items() if all(regions.get(user) == region for user in node.users)}


def _follow(graph: torch.fx.Graph, maker: Node, regions: Mapping[Node, Node]) -> Node:
    """Insert a no-op conversion `x.to(x.dtype)` after `maker`, let all other readers of `maker` read the conversion, and return it.

    `regions` maps each node in a torch.func transform to the node that opens the transform. If `maker` is in a transform, the conversion
    follows the transform, and readers inside keep reading `maker`.
    """
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
    """Insert `node.view_as(node)` after `node`, and let all other readers of `node` read this view."""
    readers = list(node.users)
    with graph.inserting_after(node):
        whole = graph.call_method("view_as", (node, node))
    whole.meta = {**node.meta, LEAVES: SHARED}
    for reader in readers:
        reader.replace_input_with(node, whole)


def read_results(graph: torch.fx.Graph) -> Iterator[Node]:
    """Yield the results of `graph`, and the operands of torch.autograd.grad in it, that may get a gradient from an op of `graph`."""
    apart = _inside_transforms(graph)
    asked = (node for call in graph.find_nodes(op="call_function", target=torch.autograd.grad) for node in call.all_input_nodes)
    for node in dict.fromkeys((*_results(graph), *asked)):
        made = node.op not in ("placeholder", "get_attr") and node not in apart and differentiable(example_value(node))
        if made and any(user.op != "output" and _takes_gradient(user) for user in node.users):
            yield node


def _hooked_values(graph: torch.fx.Graph, memory: Memory, regions: Mapping[Node, Node]) -> Iterator[Node]:
    """Yield the values with hooks that must be cast to fp32 before the hooks are set.

    If the cast came after the hooks, `retain_grad` on it would store a gradient without their effect. If the hooked tensor is an operand
    that an op returned unchanged, as dropout with p=0 does, the operand is yielded. Left out are inputs, weights, values written in place,
    values hooked in their own torch.func transform, and values outside of transforms that the backward of their own op reads.
    """
    for hook in graph.find_nodes(op="call_function", target=hooked):
        node = _before_hooks(hook)
        while (given := same_tensor(node)) is not None:
            node = _before_hooks(given)
        left = regions.get(node, node) is not regions.get(hook)  # the hook is set outside the torch.func transform that made the value
        made = node.op not in ("placeholder", "get_attr") and left and differentiable(example_value(node))
        if made and memory.written.isdisjoint(memory_of(node)) and (node in regions or not _is_read_back(_maker(node))):
            yield node


def _before_hooks(node: Node) -> Node:
    """If `node` is a hook call (`hooked`), return the value on which it sets the hook; otherwise `node`. Earlier hook calls are skipped."""
    while node.target is hooked:
        (node,) = node.all_input_nodes[:1]
    return node


def _takes_gradient(reader: Node) -> bool:
    """True if a gradient may flow back through `reader`. No gradient flows through indices, comparisons or sizes."""
    if op_name(reader.target) in _STOP:
        return False
    if any(differentiable(t) for t in tensors(example_value(reader))):
        return True
    return bool(written(reader)) or is_opaque(reader) or reader.target is torch.autograd.grad


def _results(graph: torch.fx.Graph) -> list[Node]:
    return next(node for node in graph.nodes if node.op == "output").all_input_nodes


def _read_as_another(result: Node, without_grad: Set[Node], returns_operand: Callable[[Node], bool]) -> bool:
    """True if `result` and an operand of its op are the same tensor object, and two separate casts of it would change gradients.

    This is so if the operand has other readers or hooks, if one of the two nodes is a result of a checkpoint, or if only `result` is made
    without gradients. `returns_operand(op)` is True if an op of this graph returns one of its operands.
    """
    result = _before_hooks(result)
    while (made_inside(result) is not None or returns_operand(result)) and (given := same_tensor(result)) is not None:
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
    """Records, for each storage of a graph, the nodes whose results it holds, and whether the graph returns, receives or writes it."""

    def __init__(self, graph: torch.fx.Graph, without_grad: Set[Node] = frozenset()) -> None:
        self.holders: dict[int, list[Node]] = defaultdict(list)
        self.seen_otherwise: dict[int, set[Node]] = defaultdict(set)
        """{storage: nodes whose result in it is neither floating nor complex, such as an integer view between floating views}."""
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
        returns_operand = Answers(lambda op: same_tensor(op) is not None, sized)
        again = (result for result in found if _read_as_another(result, without_grad, returns_operand))
        self.same = {storage for result in again for storage in memory_of(result)}

    def leaving(self, with_gradients: bool) -> list[int]:
        """Return the storages that must hold fp32, for example because two results share them (rule 1 of this file).

        They are sorted by the first node that uses them. `with_gradients` adds the cases that rule 1 has for graphs with gradients.
        """
        found = self.several | (self.results & self.inputs) | self.written_inside
        if with_gradients:
            found |= (self.results & self.written) | (self.inputs & self.written) | self.same
        return sorted((storage for storage in found if storage in self.holders), key=lambda s: self.position[self.holders[s][0]])

    def maker(self, storage: int) -> Node | None:
        """Return the node that makes the memory `storage`; None if an input holds it, or if several results of one op share it."""
        if storage in self.inputs:
            return None
        first = self.holders[storage][0]
        if isinstance(example_value(first), torch.Tensor):
            return first
        parts = [node for node in self.holders[storage] if first in node.all_input_nodes]
        return parts[0] if len(parts) == 1 and isinstance(example_value(parts[0]), torch.Tensor) else None

    def chain(self, storage: int) -> set[Node]:
        """Return the nodes after the maker with results in `storage` that come before its last write, or lead to a result of the graph."""
        maker = self.maker(storage)
        made = -1 if maker is None else self.position[maker]
        holders = {node for node in self.holders[storage] if self.position[node] > made}
        between = {node for node in self.seen_otherwise[storage] if self.position[node] > made}
        inside = {node for node in holders | between if node.op not in ("placeholder", "get_attr")}
        last = self.last_write[storage] if storage in self.written else -1
        ends = [node for node in holders & inside if node in self.sinks or self.position[node] <= last]
        upstream = reached(ends, lambda node: inside.intersection(node.all_input_nodes))
        return holders.intersection(upstream)
