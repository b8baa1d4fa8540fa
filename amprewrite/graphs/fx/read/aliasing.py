"""Find fx nodes that share memory written in place, and count the writes to a value before each of its readers.

Capture replaces PyTorch's own code of some ops by Python code. Their results then share memory differently: `dropout(x, 0.0)` returns
`x` itself in eager PyTorch and a copy in capture. For batched `x` and `y`, `x @ y` is a new tensor in eager PyTorch, but in capture
a view of a tensor inside the op. So `real_value` runs PyTorch's own code on fake tensors if the memory of a result matters.

This file has special code for `getitem`. If an op returns several results, a `getitem` node picks one of them, and must have the same
colour (low or high) as the op.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from amprewrite.graphs.fx.node_facts import (
    CONVERSIONS,
    GRAD_SWITCHES,
    LEAVES,
    MEMORY,
    RETURNED,
    Fact,
    arguments,
    bodies,
    differentiable,
    example_value,
    hints,
    is_checkpoint,
    is_opaque,
    memory_of,
    sized,
    storages,
    tensors,
    transformed_nodes,
    written,
)
from amprewrite.graphs.fx.ops.scale_ops import hooked
from amprewrite.graphs.fx.run.recurrent_layers import LAYERS, in_one_step
from amprewrite.graphs.fx.run.repeated_calls import Answers
from amprewrite.graphs.fx.uncaptured import unhooked
from amprewrite.graphs.log_quiet import Quiet
from amprewrite.ir.op_graph import DisjointSets
from amprewrite.tables.ops.op_lists import Trait, op_name, ops_with
from amprewrite.torch_internals.dispatch import FakeTensor

_PYTHON = torch._C.DispatchKey.CompositeImplicitAutograd
"""Dispatch key of the Python code that capture runs in place of PyTorch's own code."""
_CHOOSE, _HIDE = ops_with(Trait.CHOOSES), ops_with(Trait.HIDES_WRITES)


@dataclass
class Ties:
    """Groups of nodes that must have one colour (low or high), because they share memory written in place or are results of one kernel."""

    group: dict[torch.fx.Node, torch.fx.Node]
    """Representative of the group of each node."""
    writes_state: set[torch.fx.Node]
    """Representatives of the groups that must be fp32, because their memory is written in one of three ways.

    The memory belongs to an input, parameter or buffer, a complex or integer view of it is written, or a body graph writes it.
    """
    size: Counter[torch.fx.Node]
    """Number of nodes in a group, by its representative."""
    kept: set[torch.fx.Node]
    """Ops whose operand is written later through `.data`. Their backward must read the new values, which an earlier cast copy lacks."""


def note_memory(graph: torch.fx.Graph) -> None:
    """Record in each node's meta (key MEMORY) the storages that its result has in eager PyTorch, if they differ from those of capture."""

    def shared(op: torch.fx.Node) -> list[bool]:
        given = storages(real_value(op))
        return [not given.isdisjoint(storages(example_value(operand))) for _, operand in arguments(op)]

    really, apart, shares = dict[int, set[int]](), transformed_nodes(graph), Answers(shared)
    for node in graph.nodes:
        told = memory_of(node)
        if node not in apart and runs_as_python(node):
            viewed = [operand for (_, operand), is_shared in zip(arguments(node), shares(node), strict=True) if is_shared]
            really |= {own: memory_of(each) for each in viewed for own in told.difference(*map(memory_of, viewed))}
        if not really.keys().isdisjoint(told):
            node.meta[MEMORY] = {memory for storage in told for memory in really.get(storage, {storage})}


def is_view(node: torch.fx.Node) -> bool:
    """True if `node` returns a view of another tensor. The other tensor may be internal to the op, without a node of its own."""
    inside = made_inside(node)
    if inside is not None:
        return is_view(inside)
    value = real_value(node)
    return isinstance(value, torch.Tensor) and value._is_view()


def made_inside(node: torch.fx.Node) -> torch.fx.Node | None:
    """If `node` is a result of a checkpoint, return the node in the body graph that makes it; otherwise None."""
    source = node.args[0] if node.args else None
    if isinstance(source, torch.fx.Node) and is_checkpoint(source):
        for body in bodies(source):
            results, place = next(inner for inner in body.graph.nodes if inner.op == "output").args[0], node.args[1]
            given = results[place] if isinstance(results, tuple | list) and isinstance(place, int) else results
            return given if isinstance(given, torch.fx.Node) else None
    return None


def same_tensor(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the operand that `node` returns unchanged, as the same tensor object; None if there is none.

    For example, `contiguous` returns an operand that is contiguous already, and a checkpoint may return one of its inputs. The result is
    None for an op that writes in place, such as `add_`: it returns its operand, but changed.
    """
    inside, source = made_inside(node), node.args[0] if node.args else None
    if inside is not None and isinstance(source, torch.fx.Node):
        while (before := same_tensor(inside)) is not None:
            inside = before
        if inside.op != "placeholder":
            return None
        given = source.args[1 + inside.graph.find_nodes(op="placeholder").index(inside)]
        return given if isinstance(given, torch.fx.Node) else None
    if node.op not in ("call_function", "call_method") or is_opaque(node) or written(node) or node.target is hooked:
        return None
    shapes = [[hints(tensor) for tensor in tensors(example_value(each))] for each in (node, *node.all_input_nodes)]
    if shapes[0] not in shapes[1:]:
        return None  # no operand has the result's shape, so the op returns no operand: do not run it
    value = real_value(node)
    return next((operand for operand in node.all_input_nodes if isinstance(value, torch.Tensor) and example_value(operand) is value), None)


def reads_back(node: torch.fx.Node) -> bool:
    """True if the backward of the op reads the op's result, as for `tanh`. A second backward then gives the result a gradient.

    False for ops such as `relu` and `max`: their backward only compares the result, which gives the result no gradient.
    """
    if op_name(node.target) in _CHOOSE:
        return False
    with torch.enable_grad():
        given = tensors(real_value(node, _wanting))
    return any(storages(saved) & storages(given) for each in given for saved in _saved(_backward(each)))


def _wanting(node: torch.fx.Node) -> Any:
    """Return a copy of the example value of `node` that requires a gradient and has plain ints as sizes. Integers are not copied."""
    value = sized(node)
    return value.detach().requires_grad_().clone() if differentiable(value) else value


def _backward(value: torch.Tensor) -> Any:
    try:
        return value.grad_fn
    except RuntimeError:  # PyTorch gives no grad_fn of a view that was made without gradients and whose memory was written later
        return None


def _saved(backward: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that the autograd node `backward` saves."""
    for name in dir(backward):
        if name.startswith("_saved_") and isinstance(saved := getattr(backward, name), torch.Tensor):
            yield saved


def real_value(node: torch.fx.Node, operand: Callable[[torch.fx.Node], Any] = example_value) -> Any:
    """Return the fake result that PyTorch's own code computes for `node`; capture's example value if that code cannot run.

    `operand(node)` returns the value to use for an operand node, by default its example value. With this default, a node that writes in
    place is not run, because it would change the example values.
    """
    said = example_value(node)
    modes = [t.fake_mode for t in tensors(said) if isinstance(t, FakeTensor)]
    asked = node.op in ("call_function", "call_method") and not is_opaque(node) and node.target is not hooked
    if not asked or not modes or (operand is example_value and written(node)) or free_unbacked_symbols(tensors(said)):
        return said
    try:
        with modes[0], torch._C._DisablePythonDispatcher(), Quiet(), unhooked():
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), operand)
            if isinstance(node.target, str):
                return getattr(args[0], node.target)(*args[1:], **kwargs)
            return (in_one_step(node.target) if node.target in LAYERS else node.target)(*args, **kwargs)
    except Exception:  # for example, some kernels refuse symbolic sizes: then return capture's example value
        return said


def idle_where_alike(facts: dict[torch.fx.Node, Fact], low: str) -> Iterator[torch.fx.Node]:
    """Yield the conversions between fp32 and `low` that may return their operand itself if the plan gives the operand the target dtype.

    Such a conversion needs no copy: the graph does not write or return its result, nor later write its operand, and the strides are equal.
    """
    last_write: dict[int, int] = {}
    for fact in facts.values():
        for target in fact.writes:
            last_write |= dict.fromkeys(memory_of(target), fact.position)
    results = [leaf for node in facts if node.op == "output" for leaf in node.all_input_nodes]
    leaving = {storage for node in results for storage in memory_of(node)}
    for node, fact in facts.items():
        if fact.op not in CONVERSIONS or fact.dtype not in ("fp32", low) or not isinstance(node.args[0], torch.fx.Node):
            continue
        source, own = facts[node.args[0]], memory_of(node)
        if {source.dtype, fact.dtype} != {"fp32", low} or not own or not own.isdisjoint(leaving) or not own.isdisjoint(last_write):
            continue
        written_later = any(last_write.get(storage, -1) > fact.position for storage in memory_of(source.node))
        if written_later or not isinstance(fact.value, torch.Tensor) or fact.value.dim() != source.value.dim():
            continue
        # `statically_known_true` adds no guard, unlike a plain `==`
        if all(statically_known_true(a == b) for a, b in zip(fact.value.stride(), source.value.stride(), strict=True)):
            yield node


def runs_as_python(node: torch.fx.Node) -> bool:
    """True if capture may run Python code in place of the op's own code, so that its result may alias other tensors than in eager mode."""
    packet = getattr(torch.ops.aten, op_name(node.target), None) if node.op in ("call_function", "call_method") else None
    return packet is not None and any(_PYTHON in getattr(packet, name).py_kernels for name in packet.overloads())


def _memory(fact: Fact) -> set[int]:
    """Return the storages of a node's result; set() if `leaving.py` inserted a conversion that other ops read in place of the result."""
    return set() if any(user.meta.get(LEAVES) == RETURNED for user in fact.node.users) else _lies_in(fact)


def _lies_in(fact: Fact) -> set[int]:
    """Return the storages of a node's result. For a node that returns nothing, return the storages of the tensor that it writes."""
    return memory_of(fact.writes[0] if example_value(fact.node) is None and fact.writes else fact.node)


def _hidden_writes(facts: dict[torch.fx.Node, Fact]) -> dict[int, int]:
    """Return {storage: position of the last write to the storage through `.data`}. Autograd does not notice such writes."""
    aside: set[torch.fx.Node] = set()
    last: dict[int, int] = {}
    for node, fact in facts.items():
        own = _lies_in(fact)
        if fact.op in _HIDE or any(operand in aside and not own.isdisjoint(memory_of(operand)) for operand in node.all_input_nodes):
            aside.add(node)
        for target in fact.writes:
            if target in aside:
                last |= dict.fromkeys(memory_of(target), fact.position)
    return last


def _moves(facts: dict[torch.fx.Node, Fact]) -> dict[int, list[int]]:
    """Return {storage: positions of in-place writes that may write to a cast copy instead, because no op reads the old tensor later}.

    In `scores = q @ k; scores += bias` the product may then run low and the sum in fp32: the product is cast to fp32, and the sum writes to
    this copy. Three kinds of writes are left out. A write to an input or a weight of the model must change this tensor itself. If the grad
    mode has changed since the tensor was made, a copy would have another autograd history. If the tensor has hooks, the write keeps them
    unless the tensor is a view, as the result of a linear op on 3 dims is. A cast copy is no view, so its hooks might differ.
    """
    switches = [fact.position for fact in facts.values() if fact.op in GRAD_SWITCHES]
    lies_in: dict[int, list[Fact]] = defaultdict(list)
    for fact in facts.values():
        for storage in _lies_in(fact):
            lies_in[storage].append(fact)
    found: dict[int, list[int]] = defaultdict(list)
    for fact in facts.values():
        if len(fact.writes) != 1 or fact.writes_unsaid or fact.transformed or is_opaque(fact.node) or fact.writes[0] not in facts:
            continue
        made = facts[fact.writes[0]].position
        if any(made < switch < fact.position for switch in switches):
            continue
        for storage in _lies_in(fact) & memory_of(fact.writes[0]):
            before = [each for each in lies_in[storage] if each.position < fact.position]
            readers = [facts[user].position for each in before for user in each.node.users if user in facts]
            movable = all(each.role == "op" and each.node.target is not hooked for each in before)
            if before and movable and max(readers, default=0) <= fact.position:
                found[storage].append(fact.position)
    return found


def memory(facts: dict[torch.fx.Node, Fact], training: bool) -> tuple[Ties, Callable[[torch.fx.Node, Fact], int]]:
    """Return the `Ties` of a graph, and a function that counts the writes to a value before a reader.

    `Ties` are groups of nodes that must all run low or all run in fp32. Nodes are in one group if they share memory that is written in
    place, or if they are results of one kernel. In training, an op is also in one group with an operand that is written later through
    `.data`, because its backward may read the new values.
    """
    writes: dict[int, list[int]] = defaultdict(list)
    for fact in facts.values():
        for target in (*fact.writes, *fact.writes_unsaid):
            for storage in memory_of(target):
                writes[storage].append(fact.position)
    hidden = _hidden_writes(facts) if training and writes else {}
    moves = _moves(facts) if writes and not hidden else {}
    union, state, kept = DisjointSets[torch.fx.Node](), set(), set()
    with_hooks: set[torch.fx.Node] = set()
    first: dict[tuple[int, int], torch.fx.Node] = {}
    for node, fact in facts.items():
        if fact.dtype != "fp32" or fact.role == "output":
            continue
        union.find(node)
        if fact.op == "getitem" and isinstance(node.args[0], torch.fx.Node) and isinstance(facts[node.args[0]].value, tuple | list):
            union.join(node, node.args[0])
        if node.target is hooked:
            (inner,) = node.all_input_nodes[:1]
            union.join(node, inner)
            # An op such as dropout with p=0 returns its operand itself, so the operand has the hook, too.
            # Stop at a conversion that mark_leaving inserted (RETURNED): nothing else reads its operand.
            while inner.meta.get(LEAVES) != RETURNED and (before := same_tensor(inner)) is not None:
                union.join(inner, before)
                inner = before
            with_hooks.add(node)
        elif not with_hooks.isdisjoint(node.all_input_nodes) and (hooked_too := same_tensor(node)) is not None:
            union.join(node, hooked_too)  # a gradient that the model computes for this tensor passes through the hook, too
            with_hooks.add(node)
        # Include a returned value, which `_memory` leaves out, if its memory is later written through `.data`: autograd may save the value.
        for storage in _memory(fact) or _lies_in(fact) & hidden.keys() if writes else ():
            # Join nodes that share memory, unless this node comes after the last write to it, or all writes to it can go to cast copies.
            if fact.position <= max(writes.get(storage, (-1,))) and set(writes[storage]) != set(moves.get(storage, ())):
                home = sum(position <= fact.position for position in moves.get(storage, ()))
                union.join(node, first.setdefault((storage, home), node))
        for operand in node.all_input_nodes if hidden and fact.role == "op" and not fact.writes else ():
            given = _lies_in(facts[operand])
            written_later = any(fact.position < hidden.get(storage, -1) for storage in given)
            if written_later and facts[operand].dtype == "fp32" and given.isdisjoint(_lies_in(fact)):
                union.join(node, operand)
                kept.add(node)
    # Keep a tensor in fp32 if a complex or integer view of it is written: if it were low, only a cast copy of it would change.
    odd = [target for fact in facts.values() for target in fact.writes if facts[target].dtype != "fp32"]
    seen_otherwise = {storage for target in odd for storage in memory_of(target)}
    for node, fact in facts.items():
        inside = _lies_in(fact) if fact.dtype == "fp32" and writes else set()
        if (fact.role != "op" and any(storage in writes for storage in inside)) or not inside.isdisjoint(seen_otherwise):
            state.add(union.find(node))
        if is_opaque(node):  # the body graph of this op writes fp32 to these operands, so their groups must be fp32
            state |= {union.find(target) for target in fact.writes if facts[target].dtype == "fp32"}
    group = {node: union.find(node) for node in list(union.parent)}

    def write_version(value: torch.fx.Node, reader: Fact) -> int:
        if not writes:
            return 0
        return sum(position < reader.position for storage in _memory(facts[value]) for position in writes.get(storage, ()))

    return Ties(group, state, Counter(group.values()), kept), write_version
