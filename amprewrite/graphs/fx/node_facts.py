"""Facts about one fx node: value, dtype, role, the tensors it writes, and the shapes behind its FLOPs.

One file because all of these functions query the same node, and most of them each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.fx

from amprewrite.ir.op_graph import Operand
from amprewrite.tables.formats import dtype_name
from amprewrite.tables.ops.op_lists import Op, Trait, find_op, is_inplace, op_name, ops_with
from amprewrite.tables.vocabulary import Colour, OpKind, Reason
from amprewrite.torch_internals.dispatch import FakeTensor, is_wrapped_by_transform, tracing_context
from amprewrite.torch_internals.operators import HigherOrderOperator, OpOverload, OpOverloadPacket
from amprewrite.torch_internals.trees import tree_leaves

Leaf = TypeVar("Leaf")
NO_TREE = {type(None), bool, int, float, str}
"""Classes of values that hold neither tensors nor nodes."""
SET_GRAD = ("_set_grad_enabled", "set_grad_enabled")
ENTER_INFERENCE, EXIT_INFERENCE = "_enter_inference_mode", "_exit_inference_mode"
GRAD_SWITCHES = (*SET_GRAD, ENTER_INFERENCE, EXIT_INFERENCE)
"""Ops that begin another grad mode. Tensors of inference mode cannot be saved for backward, so copies are not shared across these."""
CONVERSIONS = ops_with(Trait.CONVERTS)
BODIES = {"tag_activation_checkpoint"}
"""Higher-order ops whose body is rewritten like a separate graph. Any other is opaque."""
TAKES_SHAPE_ONLY, LIKE_SECOND = ops_with(Trait.TAKES_SHAPE_ONLY), ops_with(Trait.LIKE_SECOND)
ABSOLUTE = {"float"}
"""Conversions whose dtype is always spelled out."""
BIT_VIEWS = ops_with(Trait.READS_BITS)
FAR = 10
"""Number of ops between a uniform draw and a logarithm from which on the two are unrelated."""
LEAVES = "amprewrite_leaves"
"""Key in a node's meta with RETURNED, SHARED or READ_BACK.

RETURNED marks a value that leaves the graph itself, SHARED memory that does, READ_BACK the op of a result that its own backward reads.
"""
RETURNED, SHARED, READ_BACK = "returned", "shared", "read back"
MEMORY = "amprewrite_memory"
"""Key in a node's meta: the memory of its result, if capture records another."""
HELD = "amprewrite_held"
"""Key in the meta of an input that the model holds."""
NODE = "amprewrite_node"
"""Key in the meta of a node of an edited graph: its name in the plan. A cast has the name of the value it copies."""

ROLES = {"placeholder", "get_attr", "output"}
FUNCTORCH = ("_increment_nesting", "_decrement_nesting")
"""Ends of the names of the ops that open and close a torch.func transform."""
ENTER_AUTOCAST, EXIT_AUTOCAST = "_enter_autocast", "_exit_autocast"


@dataclass
class Fact:
    """Facts about one fx node before it becomes a vertex."""

    node: torch.fx.Node
    position: int
    op: str
    row: Op | None
    role: str
    value: Any
    dtype: str
    writes: tuple[torch.fx.Node, ...] = ()
    writes_unsaid: tuple[torch.fx.Node, ...] = ()
    """Tensors that it writes though its name does not say so."""
    autocast: str = ""
    transformed: bool = False
    pinned: tuple[Colour, Reason, str] | None = None
    relative: bool = False
    may_be_idle: bool = False
    """True if a conversion may return its operand itself, if that has the target dtype."""
    kind: OpKind | None = None
    may_saturate: bool = False
    name: str = ""
    rank: int = 0
    operands: list[Operand] = field(default_factory=list)


def example_value(node: torch.fx.Node) -> Any:
    """The example value that capture left on a node: a fake tensor, a structure of them, or None."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def tensors(value: Any) -> list[torch.Tensor]:
    return _leaves_of(torch.Tensor, value)


def _leaves_of(kind: type[Leaf], value: Any) -> list[Leaf]:
    """The leaves of `value` of one class. Most values are one leaf; only structures need pytree."""
    if isinstance(value, kind):
        return [value]
    return [] if type(value) in NO_TREE else [leaf for leaf in tree_leaves(value) if isinstance(leaf, kind)]


def draws_before_logs(facts: Mapping[torch.fx.Node, Fact]) -> set[torch.fx.Node]:
    """Uniform draws, the results of pointwise ops on them, and the logarithms that read these.

    A draw below one rounds up to one in a low format. Gumbel and exponential sampling take the logarithm of its distance from one.
    """
    draws, logs = ops_with(Trait.DRAWS), ops_with(Trait.LOGARITHM)
    between = ops_with(Trait.KEEPS_DRAW, Trait.LOGARITHM)
    made: dict[torch.fx.Node, int] = {}
    found: set[torch.fx.Node] = set()
    for node, fact in facts.items():
        steps = min((made[each] + 1 for each in node.all_input_nodes if each in made), default=FAR)
        if fact.dtype != "fp32" or not (fact.op in draws or (steps < FAR and fact.op in between)):
            continue
        made[node] = 0 if fact.op in draws else steps
        waiting = [node] if fact.op in logs else []
        while waiting:
            last = waiting.pop()
            found.add(last)
            waiting += [each for each in last.all_input_nodes if each in made and each not in found]
    return found


def is_checkpoint(node: torch.fx.Node) -> bool:
    """True if the node runs the body of an activation checkpoint."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in BODIES


def is_batched(tensor: torch.Tensor) -> bool:
    """True if a vmap inside the graph batches this tensor: ops can read it, but its values cannot be looked at."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def storages(value: Any) -> set[int]:
    """The storages of the tensors in `value`. A tensor wrapped by torch.func has the storage of the tensor inside."""
    found = set()
    for tensor in tensors(value):
        while is_wrapped_by_transform(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if tensor.layout == torch.strided and not tensor.is_nested:
            found.add(tensor.untyped_storage()._cdata)
    return found


def memory_of(node: torch.fx.Node) -> set[int]:
    """The storages of a node's result."""
    known: set[int] | None = node.meta.get(MEMORY)
    return storages(example_value(node)) if known is None else known


def differentiable(value: Any) -> bool:
    """True if a gradient may belong to `value`.

    Capture's `requires_grad` is lost after data-dependent shapes. So every floating tensor counts.
    """
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


NOT_DENSE = ("sparse", "nested")
"""Beginnings of the dtypes of values without a dense, strided layout."""
_LAYOUTS = {torch.strided: "", torch.jagged: "nested "}


def value_dtype(value: Any) -> str:
    """Name of the dtype of a value's floating tensors, or of all its tensors if none is floating, with "sparse" or "nested" before it."""
    every = tensors(value)
    floating = [t for t in every if t.is_floating_point() or t.is_complex()]
    return "+".join(sorted({f"{_LAYOUTS.get(t.layout, 'sparse ')}{dtype_name(t.dtype)}" for t in floating or every}))


def hint(size: Any) -> int:
    """A size as a plain int without making a guard: a symbolic size gives its hint, or 64."""
    if isinstance(size, int):
        return size
    known = getattr(getattr(size, "node", None), "_hint", None)
    return int(known) if isinstance(known, int) else 64


def comparable(size: Any) -> Any:
    """A size in a form that compares with others without a guard: a symbolic size gives its expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def read_fact(node: torch.fx.Node, position: int) -> Fact:
    op = op_name(node.target) if node.op in ("call_function", "call_method") else ""
    op = "autograd.grad" if node.target is torch.autograd.grad else op  # op_name gives `grad`, which is also the attribute `x.grad`
    row = _form_of(find_op(op), node) if op else None
    value = example_value(node)
    fact = Fact(node, position, row.name if row else op or node.op, row, _role(node, value), value, value_dtype(value))
    if isinstance(node.target, HigherOrderOperator):
        fact.dtype = ""  # read from its getitems
    fact.writes, fact.writes_unsaid = written(node), written_unsaid(node)
    if value is None and fact.writes:  # setitem and similar ops return nothing: they stand for the tensor that they write
        fact.value = example_value(fact.writes[0])
        fact.dtype = value_dtype(fact.value)
    return fact


def _form_of(row: Op | None, node: torch.fx.Node) -> Op | None:
    """The row of the op that this call is with its arguments."""
    if row is None or not row.forms:
        return row
    given = _given(node)
    image = next(iter(tensors(example_value(node))), None)
    dims = len(given["pad"]) // 2 if isinstance(given.get("pad"), list | tuple) else 0 if image is None else image.dim() - 2
    asked = (find_op(other.format(dims)) for argument, value, other in row.forms if given.get(argument) == value)
    return next(filter(None, asked), row)


def _role(node: torch.fx.Node, value: Any) -> str:
    if node.op == "output":
        return "output"
    if node.op not in ROLES:
        return "op"
    source = source_name(node)
    held = held_value(node) if node.op == "get_attr" else None
    if isinstance(value, torch.nn.Parameter) or isinstance(held, torch.nn.Parameter) or "_parameters[" in source:
        return "parameter"
    if "_buffers[" in source or (isinstance(held, torch.Tensor) and is_buffer(node)):
        return "buffer"
    return "constant" if node.op == "get_attr" else "input"


def held_value(node: torch.fx.Node) -> Any:
    """The value that a get_attr node reads from its module."""
    held: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        held = getattr(held, part, None)
    return held


def is_buffer(node: torch.fx.Node) -> bool:
    path, _, last = str(node.target).rpartition(".")
    owner = node.graph.owning_module
    return owner is not None and last in owner.get_submodule(path)._buffers


@dataclass(frozen=True)
class InputSource:
    """Source of a graph input in Dynamo, without the input: a weak reference to a weight would block `swap_tensors`."""

    source: Any


def kept_meta(meta: dict[str, Any]) -> dict[str, Any]:
    """Metadata for a copy of a captured node, without Dynamo's reference to the graph input, which must not be kept alive."""
    found = meta.get("grapharg")
    return dict(meta) if found is None else {**meta, "grapharg": InputSource(getattr(found, "source", None))}


def forget_inputs(graph: torch.fx.Graph) -> None:
    """Clear the weak references of a graph's fake modes to the real tensors of its fakes, after capture and compilation."""
    modes = {t.fake_mode for node in graph.nodes for t in tensors(example_value(node)) if isinstance(t, FakeTensor)}
    tracing = tracing_context()  # AOTAutograd has a mode of its own
    if tracing is not None:
        tracing.tensor_to_context.clear()
    for mode in modes | ({tracing.fake_mode} if tracing is not None and tracing.fake_mode is not None else set()):
        describer = mode.fake_tensor_converter.meta_converter.describer
        describer.lookup_tensor.clear()
        describer.lookup_storage.clear()


def source_name(node: torch.fx.Node) -> str:
    """Source of a graph input in Dynamo: "L['self']._modules['fc']._parameters['weight']"; "" if there is none."""
    arg = node.meta.get("grapharg")
    source = getattr(arg, "source", None)
    name = getattr(source, "name", "")
    return name() if callable(name) else name


def note_held(graph: torch.fx.Graph) -> None:
    """Mark the inputs that Dynamo found in a module or a global instead of a call's arguments. Dynamo forgets that after capture."""
    for node in graph.find_nodes(op="placeholder"):
        kind = getattr(getattr(node.meta.get("grapharg"), "source", None), "guard_source", None)
        name = getattr(kind() if callable(kind) else kind, "name", "")
        if name.startswith("GLOBAL") or name.endswith("MODULE"):
            node.meta[HELD] = True


def is_held(node: torch.fx.Node) -> bool:
    """True if the model holds the value: a weight, a buffer, a counter in an attribute or in a global."""
    return node.op == "get_attr" or HELD in node.meta


def written(node: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
    """Tensors that the node writes in place."""
    written = _leaves_of(torch.fx.Node, node.kwargs.get("out"))
    first = node.args[0] if node.args else None
    if isinstance(first, torch.fx.Node) and node.op in ("call_function", "call_method"):
        inplace = is_inplace(node.target)
        if not inplace and node.op == "call_function" and "inplace" in _parameters(node.target):
            at = _parameters(node.target).index("inplace")
            inplace = node.kwargs.get("inplace", node.args[at] if at < len(node.args) else False) is True
        if inplace and tensors(example_value(first)):
            written.append(first)
    elif node.op == "call_function" and is_inplace(node.target):  # torch._foreach_mul_ takes a list of tensors that it writes
        written += _leaves_of(torch.fx.Node, first)
    if isinstance(node.target, HigherOrderOperator):
        written += _written_by_bodies(node)
    elif isinstance(node.target, OpOverload | OpOverloadPacket):
        written += [argument for argument in _written_by_schema(node) if argument not in written]
    return tuple(written)


def written_unsaid(node: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
    """Weights and statistics that the node writes in addition to its result, though its name does not say so."""
    row = find_op(op_name(node.target)) if node.op.startswith("call") else None
    if row is None or not row.writes:
        return ()
    given = _given(node)
    asked = (given.get(argument) for argument, told in row.writes if given.get(told, _default(node.target, told)) not in (None, False))
    return tuple(argument for argument in asked if isinstance(argument, torch.fx.Node))


@lru_cache(maxsize=256)
def _default(target: Callable[..., Any] | str, name: str) -> Any:
    """Default of an argument of a Python function; None if it is unknown."""
    try:
        return inspect.signature(target).parameters[name].default  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError):
        return None


def _given(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call, by name."""
    return {**dict(zip(_parameters(node.target), node.args, strict=False)), **node.kwargs}


def written_inputs(graph: torch.fx.Graph) -> frozenset[int]:
    """Positions of the inputs whose memory the graph writes, including writes by views and through `.data`."""
    memory = {storage for node in graph.nodes for target in (*written(node), *_unsaid_in_bodies(node)) for storage in memory_of(target)}
    return frozenset(place for place, node in enumerate(graph.find_nodes(op="placeholder")) if not memory.isdisjoint(memory_of(node)))


def _unsaid_in_bodies(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
    """`written_unsaid`, including writes in the bodies of a higher-order op: a batch norm in a checkpoint writes its statistics."""
    return _written_by_bodies(node, _unsaid_in_bodies) if isinstance(node.target, HigherOrderOperator) else written_unsaid(node)


def _written_by_schema(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Arguments that a custom op writes, by its schema."""
    target: Any = node.target
    if isinstance(target, OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else None)
            yield from _leaves_of(torch.fx.Node, given)


def bodies(node: torch.fx.Node) -> list[torch.fx.GraphModule]:
    """The graphs that a higher-order op runs; [] for any other node."""
    owner = node.graph.owning_module
    if owner is None or not isinstance(node.target, HigherOrderOperator):
        return []
    found = [getattr(owner, str(argument.target), None) for argument in node.all_input_nodes if argument.op == "get_attr"]
    return [body for body in found if isinstance(body, torch.fx.GraphModule)]


def _written_by_bodies(node: torch.fx.Node, write: Callable[[torch.fx.Node], Iterable[torch.fx.Node]] = written) -> list[torch.fx.Node]:
    """Operands that the body of a higher-order op writes; `write` returns the operands that a node of the body writes.

    Only for a checkpoint it is known which; any other op counts with all operands.
    """
    operands = [a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, torch.fx.Node) and tensors(example_value(a))]
    if "mutation" in node.target.name():  # type: ignore[union-attr]
        return operands
    found: list[torch.fx.Node] = []
    for body in bodies(node):
        memory = {storage for inner in body.graph.nodes for target in write(inner) for storage in storages(example_value(target))}
        inputs = body.graph.find_nodes(op="placeholder")
        places = [place for place, inner in enumerate(inputs) if memory & storages(example_value(inner))]
        if is_checkpoint(node):
            found += [a for place in places if isinstance(a := node.args[place + 1], torch.fx.Node)]
        elif places:
            found += operands
    return list(dict.fromkeys(found))


def takes_gradients(graph: torch.fx.Graph) -> bool:
    """True if the graph computes gradients itself: by torch.autograd, or by a torch.func.vjp function called outside of the transform."""
    if any(node.target in (torch.autograd.grad, torch.autograd.backward, "backward") for node in graph.nodes):
        return True
    pulled = graph.find_nodes(op="call_function", target=torch._functorch.eager_transforms._autograd_grad)
    if pulled and not transformed_nodes(graph).issuperset(pulled):
        return True
    return any(takes_gradients(body.graph) for node in graph.nodes for body in bodies(node))


def differentiates(graph: torch.fx.Graph) -> bool:
    """True if the graph computes gradients, itself or in a torch.func transform: without recording it fails or gives zeros."""
    names = (str(getattr(node.target, "__name__", "")) for node in graph.nodes)
    return takes_gradients(graph) or any(name.endswith("_grad_increment_nesting") for name in names)


def named_arguments(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call by parameter name, as far as names are known, with None for parameters that are not given."""
    names = _parameters(node.target)
    return {**dict.fromkeys(names), **dict(zip(names, node.args, strict=False)), **node.kwargs}


def set_argument(node: torch.fx.Node, place: int, name: str, value: Any) -> None:
    """Set an argument of an op: by position if it is given so now, otherwise by name."""
    if len(node.args) > place:
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


@lru_cache(maxsize=1024)
def _parameters(target: Callable[..., Any] | str) -> tuple[str, ...]:
    """Names of the parameters of a target, in order; () if they are unknown."""
    if isinstance(target, OpOverload):
        return tuple(argument.name for argument in target._schema.arguments)
    if callable(target) and not isinstance(target, OpOverloadPacket):
        try:
            return tuple(inspect.signature(target).parameters)
        except (ValueError, TypeError):
            pass  # a builtin: its ATen schema has the names
    packet = getattr(torch.ops.aten, op_name(target), None)
    return _parameters(getattr(packet, packet.overloads()[0])) if packet is not None else ()


def note_autocast(facts: dict[torch.fx.Node, Fact]) -> None:
    """Mark nodes inside the model's own autocast regions: "on" or "off"."""
    stack: list[tuple[torch.fx.Node, str]] = []
    for node, fact in facts.items():
        if fact.op == ENTER_AUTOCAST:
            stack.append((node, "on" if node.args[2] else "off"))
        elif fact.op == EXIT_AUTOCAST:
            stack = [entry for entry in stack if entry[0] is not node.args[0]]
        elif stack:
            fact.autocast = stack[-1][1]


def transform_regions(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """For each node inside a torch.func transform (vmap, grad, jvp): the node that opens the outermost one around it."""
    return {node: around[0] for node, around in transform_openings(graph).items()}


def transformed_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Nodes inside a torch.func transform: their values exist at a level of their own."""
    return set(transform_regions(graph))


def transform_openings(graph: torch.fx.Graph) -> dict[torch.fx.Node, tuple[torch.fx.Node, ...]]:
    """For each node inside torch.func transforms: the nodes that open them, outermost first."""
    around, found = list[torch.fx.Node](), {}
    for node in graph.nodes:
        opens, closes = (str(getattr(node.target, "__name__", "")).endswith(end) for end in FUNCTORCH)
        around += [node] if opens else []
        if around:
            found[node] = tuple(around)
        del around[len(around) - closes :]
    return found


Openings = Mapping[torch.fx.Node, tuple[torch.fx.Node, ...]]


def outside(openings: Openings, value: torch.fx.Node, user: torch.fx.Node) -> torch.fx.Node:
    """The node before which to copy `value` for `user`: `user`, or the opening of the outermost transform around it but not around `value`.

    A copy inside a transform is a value of its level. The op that begins the transform takes values from outside.
    """
    around = openings.get(value, ())
    return next((opening for opening in openings.get(user, ()) if opening not in around), user)


def is_opaque(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and isinstance(node.target, HigherOrderOperator)


def arguments(node: torch.fx.Node) -> Iterator[tuple[str, torch.fx.Node]]:
    """Every node among the arguments, with the name of its parameter ("" if unknown)."""
    names = _parameters(node.target) if node.op in ("call_function", "call_method") else ()
    for position, argument in enumerate(node.args):
        name = names[position] if position < len(names) else ""
        yield from ((name, leaf) for leaf in _leaves_of(torch.fx.Node, argument))
    for name, argument in node.kwargs.items():
        yield from ((name, leaf) for leaf in _leaves_of(torch.fx.Node, argument))


def device_of(value: Any) -> str:
    found = tensors(value)
    return found[0].device.type if found else "cpu"
