"""Facts about one fx node: value, dtype, role, arguments, the tensors that it writes, and the regions (autocast, torch.func) around it.

One file because all of these functions query one node, and most call each other.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch
import torch.fx

from amprewrite.ir.op_graph import Operand
from amprewrite.tables.formats import dtype_name
from amprewrite.tables.ops.op_lists import Op, Trait, find_op, is_inplace, op_name, ops_with
from amprewrite.tables.vocabulary import Colour, OpKind, Reason
from amprewrite.torch_internals.dispatch import FakeTensor, is_wrapped_by_transform, tracing_context
from amprewrite.torch_internals.operators import HigherOrderOperator, OpOverload, OpOverloadPacket
from amprewrite.torch_internals.trees import tree_leaves, tree_map

NO_TREE = {type(None), bool, int, float, str}
"""Classes of values that contain neither tensors nor nodes, so that pytree need not search them."""
SET_GRAD = ("_set_grad_enabled", "set_grad_enabled")
ENTER_INFERENCE, EXIT_INFERENCE = "_enter_inference_mode", "_exit_inference_mode"
GRAD_SWITCHES = (*SET_GRAD, ENTER_INFERENCE, EXIT_INFERENCE)
"""Ops that change the grad mode. Ops before and after them share no cast: a cast made in inference mode cannot be saved for backward."""
CONVERSIONS = ops_with(Trait.CONVERTS)
BODIES = {"tag_activation_checkpoint"}
"""Names of the higher-order ops that run an activation checkpoint. Only the body graph of a checkpoint may return low results."""
TAKES_SHAPE_ONLY, LIKE_SECOND = ops_with(Trait.TAKES_SHAPE_ONLY), ops_with(Trait.LIKE_SECOND)
ABSOLUTE = {"float"}
"""Conversions whose name spells out the dtype: `x.float()`."""
BIT_VIEWS = ops_with(Trait.READS_BITS)
NUMPY_CALLS = "torch._dynamo.utils"  # module of the classes that wrap calls of NumPy in a captured graph
LEAVES = "amprewrite_leaves"
"""Key in a node's meta for the reason why the node's result must be fp32 for the caller of the graph: RETURNED, SHARED or READ_BACK.

RETURNED marks a value that the graph returns or that has hooks, SHARED a value in memory that the caller or a body graph uses, too, and
READ_BACK an op whose result is returned and read by the op's own backward.
"""
RETURNED, SHARED, READ_BACK = "returned", "shared", "read back"
MEMORY = "amprewrite_memory"
"""Key in a node's meta: the storages of its result in eager PyTorch. It is set only if the example value may be in other storages."""
FRESH = itertools.count(-1, -1)
"""New storage ids for `MEMORY` (-1, -2, ...), for memory that no example value has."""
HELD = "amprewrite_held"
"""Key in the meta of a graph input that the model holds (a weight, a global) instead of taking it as an argument."""
NODE = "amprewrite_node"
"""Key in the meta of a node of an edited graph: the node's name in the plan. A cast has the name of the value that it casts."""

ROLES = {"placeholder", "get_attr", "output"}
FUNCTORCH = OPENS, CLOSES = "_increment_nesting", "_decrement_nesting"
"""Suffixes of the names of the ops that open a torch.func transform, and of the ops that close one."""
ENTER_AUTOCAST, EXIT_AUTOCAST = "_enter_autocast", "_exit_autocast"


@dataclass
class Fact:
    """Facts about one fx node, collected before it becomes a node of the planner's op graph."""

    node: torch.fx.Node
    position: int
    op: str
    row: Op | None
    role: str
    value: Any
    dtype: str
    writes: tuple[torch.fx.Node, ...] = ()
    writes_unsaid: tuple[torch.fx.Node, ...] = ()
    """Operands that the op writes although its name does not show it, such as running statistics."""
    autocast: str = ""
    transformed: bool = False
    pinned: tuple[Colour, Reason, str] | None = None
    relative: bool = False
    may_be_idle: bool = False
    """True if the node is a conversion that may return its operand itself when the operand has the target dtype already."""
    kind: OpKind | None = None
    may_saturate: bool = False
    name: str = ""
    rank: int = 0
    operands: list[Operand] = field(default_factory=list)


def example_value(node: torch.fx.Node) -> Any:
    """Return the example value that capture left on `node`: a fake tensor, a structure of fake tensors, a number, or None."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in `value`. Most values are one tensor, so only structures go through pytree."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [] if type(value) in NO_TREE else [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _nodes_in(argument: Any) -> list[torch.fx.Node]:
    """Return the nodes in an argument of a call."""
    if isinstance(argument, torch.fx.Node):
        return [argument]
    return [] if type(argument) in NO_TREE else [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.fx.Node)]


def is_checkpoint(node: torch.fx.Node) -> bool:
    """True if the node runs the body graph of an activation checkpoint."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in BODIES


def is_batched(tensor: torch.Tensor) -> bool:
    """True if a vmap inside the graph batches `tensor`: ops can read the tensor, but Python code cannot read its values."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def storages(value: Any) -> set[int]:
    """Return the ids of the storages of all strided tensors in `value`. If torch.func wraps a tensor, its inner tensor counts."""
    found = set()
    for tensor in tensors(value):
        while is_wrapped_by_transform(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if tensor.layout == torch.strided and not tensor.is_nested:
            found.add(tensor.untyped_storage()._cdata)
    return found


def memory_of(node: torch.fx.Node) -> set[int]:
    """Return the ids of the storages of the eager result of `node`: from `node.meta[MEMORY]` if set, otherwise from its example value."""
    known: set[int] | None = node.meta.get(MEMORY)
    return storages(example_value(node)) if known is None else known


def differentiable(value: Any) -> bool:
    """True if `value` may have a gradient: if it is a floating-point or complex tensor.

    `requires_grad` is not read, because capture loses it after data-dependent shapes.
    """
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


NOT_DENSE = ("sparse", "nested")
"""Prefixes of the dtype names (`value_dtype`) of tensors without a dense, strided layout."""
_LAYOUTS = {torch.strided: "", torch.jagged: "nested "}


def value_dtype(value: Any) -> str:
    """Return the dtypes of the floating tensors in `value`, such as "fp32", "bf16+fp32" or "sparse fp32".

    If no tensor is floating, return the dtypes of all tensors; "" without tensors.
    """
    every = tensors(value)
    floating = [t for t in every if t.is_floating_point() or t.is_complex()]
    return "+".join(sorted({f"{_LAYOUTS.get(t.layout, 'sparse ')}{dtype_name(t.dtype)}" for t in floating or every}))


def hint(size: Any) -> int:
    """Return `size` as a plain int without adding a guard: the hint of a symbolic size, or 64 if the size has no hint."""
    if isinstance(size, int):
        return size
    known = getattr(getattr(size, "node", None), "_hint", None)
    return int(known) if isinstance(known, int) else 64


def hints(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes of `tensor` as plain ints without adding a guard, each by `hint`."""
    shape = tensor.shape
    return tuple(map(hint, shape)) if torch.SymInt in map(type, shape) else tuple(shape)


def named_sizes(tensor: torch.Tensor) -> tuple[int | str, ...]:
    """Return the sizes of `tensor`: ints, and the texts of symbolic sizes."""
    shape = tensor.shape
    return tuple(s if isinstance(s, int) else str(s) for s in shape) if torch.SymInt in map(type, shape) else tuple(shape)


def sized(node: torch.fx.Node) -> Any:
    """Return the example value of `node`, with each symbolic size replaced by its int at capture. Ops on it run ten times as fast."""
    value = example_value(node)
    return tree_map(_sized, value) if isinstance(value, tuple | list) else _sized(value)


def _sized(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return hint(value)
    sizes = (*value.shape, *value.stride()) if type(value) is FakeTensor and value.layout is torch.strided else ()
    if torch.SymInt not in map(type, sizes):
        return value
    with value.fake_mode:
        return torch.empty_strided(hints(value), tuple(map(hint, value.stride())), dtype=value.dtype, device=value.device)


def comparable(size: Any) -> Any:
    """Return `size` in a form that `==` compares without adding a guard: the expression of a symbolic size, or the int itself."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def read_fact(node: torch.fx.Node, position: int) -> Fact:
    """Return the `Fact` (value, dtype, role, writes) of `node`, which is at `position` in its graph."""
    op = op_name(node.target) if node.op in ("call_function", "call_method") else ""
    op = "autograd.grad" if node.target is torch.autograd.grad else op  # not "grad", which names the attribute `x.grad`
    row = _form_of(find_op(op), node) if op else None
    value = example_value(node)
    fact = Fact(node, position, row.name if row else op or node.op, row, _role(node, value), value, value_dtype(value))
    if is_higher_order(node.target):
        fact.dtype = ""  # a higher-order op returns a tuple, which has no dtype; the getitems that pick its results have dtypes
    fact.writes, fact.writes_unsaid = written(node), written_unsaid(node)
    if value is None and fact.writes:  # an op such as setitem returns nothing, so take the tensor that it writes
        fact.value = example_value(fact.writes[0])
        fact.dtype = value_dtype(fact.value)
    return fact


def _form_of(row: Op | None, node: torch.fx.Node) -> Op | None:
    """Return the op-table row for the call `node`: `row`, or another op's row if the arguments of the call make it compute this other op.

    For example, `interpolate` with mode="area" is an average pooling.
    """
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
    """Return the value that a get_attr node reads from its module; None if the module has no such attribute."""
    held: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        held = getattr(held, part, None)
    return held


def held_values(graph: torch.fx.Graph, inputs: Sequence[Any]) -> Iterator[tuple[torch.fx.Node, Any]]:
    """Yield (node, value): each input of `graph` with its value in `inputs`, and each get_attr node with the value that it reads."""
    yield from zip(graph.find_nodes(op="placeholder"), inputs, strict=False)
    yield from ((node, held_value(node)) for node in graph.find_nodes(op="get_attr"))


def is_buffer(node: torch.fx.Node) -> bool:
    path, _, last = str(node.target).rpartition(".")
    owner = node.graph.owning_module
    return owner is not None and last in owner.get_submodule(path)._buffers


@dataclass(frozen=True)
class InputSource:
    """Dynamo's source of a graph input, without a weak reference to the input, because such a reference makes `swap_tensors` fail."""

    source: Any


def kept_meta(meta: dict[str, Any]) -> dict[str, Any]:
    """Return a node's metadata `meta` for a copy of the node. An `InputSource` replaces Dynamo's reference to the graph input."""
    found = meta.get("grapharg")
    return dict(meta) if found is None else {**meta, "grapharg": InputSource(getattr(found, "source", None))}


def forget_inputs(graph: torch.fx.Graph) -> None:
    """After capture, drop the fake modes' weak references to inputs of `graph`: such references make `torch.utils.swap_tensors` fail."""
    modes = {t.fake_mode for node in graph.nodes for t in tensors(example_value(node)) if isinstance(t, FakeTensor)}
    tracing = tracing_context()  # AOTAutograd has a fake mode of its own: clear it, too
    if tracing is not None:
        tracing.tensor_to_context.clear()
    for mode in modes | ({tracing.fake_mode} if tracing is not None and tracing.fake_mode is not None else set()):
        describer = mode.fake_tensor_converter.meta_converter.describer
        describer.lookup_tensor.clear()
        describer.lookup_storage.clear()


def source_name(node: torch.fx.Node) -> str:
    """Return Dynamo's source of a graph input, such as "L['self']._modules['fc']._parameters['weight']"; "" if it has none."""
    arg = node.meta.get("grapharg")
    source = getattr(arg, "source", None)
    name = getattr(source, "name", "")
    return name() if callable(name) else name


def note_held(graph: torch.fx.Graph) -> None:
    """Mark (key HELD in the meta) the graph inputs that Dynamo took from a module or a global, such as weights.

    Call it at capture, because Dynamo forgets afterwards where an input comes from.
    """
    for node in graph.find_nodes(op="placeholder"):
        kind = getattr(getattr(node.meta.get("grapharg"), "source", None), "guard_source", None)
        name = getattr(kind() if callable(kind) else kind, "name", "")
        if name.startswith("GLOBAL") or name.endswith("MODULE"):
            node.meta[HELD] = True


def is_held(node: torch.fx.Node) -> bool:
    """True if the model holds the value of `node`: a weight, a buffer, a counter in an attribute or in a global."""
    return node.op == "get_attr" or HELD in node.meta


def written(node: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
    """Return the operands that `node` writes in place, as its name, arguments, schema or body graphs show."""
    kwargs = node.kwargs
    if "out" not in kwargs and not _may_write(node.target):
        return ()
    written = _nodes_in(kwargs.get("out"))
    if type(node.target).__module__ == NUMPY_CALLS:  # NumPy names such as "sort" do not show writes, but version counters do
        written += [a for a in node.all_input_nodes if any(t.is_inference() or t._version for t in tensors(example_value(a)))]
    first = node.args[0] if node.args else kwargs.get("input", kwargs.get("self"))
    if isinstance(first, torch.fx.Node) and node.op in ("call_function", "call_method"):
        inplace = is_inplace(node.target)
        if not inplace and node.op == "call_function" and "inplace" in _parameters(node.target):
            at = _parameters(node.target).index("inplace")
            inplace = kwargs.get("inplace", node.args[at] if at < len(node.args) else False) is True
        if inplace and tensors(example_value(first)):
            written.append(first)
    elif node.op == "call_function" and is_inplace(node.target):  # an op such as torch._foreach_mul_ writes to all tensors of a list
        written += _nodes_in(first)
    if is_higher_order(node.target):
        written += _written_by_bodies(node)
    elif isinstance(node.target, OpOverload | OpOverloadPacket):
        written += [argument for argument in _written_by_schema(node) if argument not in written]
    return tuple(written)


@lru_cache(maxsize=1024)
def _may_write(target: Callable[..., Any] | str) -> bool:
    """True if a call of `target` without the argument `out` may write to an operand. A quick test, which rules most ops out."""
    by_class = isinstance(target, HigherOrderOperator | OpOverload | OpOverloadPacket) or type(target).__module__ == NUMPY_CALLS
    return by_class or is_inplace(target) or (not isinstance(target, str) and "inplace" in _parameters(target))


def written_unsaid(node: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
    """Return the operands that an op writes although its name does not show it: running statistics, an embedding's table (max_norm)."""
    row = find_op(op_name(node.target)) if node.op.startswith("call") else None
    if row is None or not row.writes:
        return ()
    given = _given(node)
    asked = (given.get(argument) for argument, told in row.writes if given.get(told, _default(node.target, told)) not in (None, False))
    return tuple(argument for argument in asked if isinstance(argument, torch.fx.Node))


@lru_cache(maxsize=256)
def _default(target: Callable[..., Any] | str, name: str) -> Any:
    """Return the default of the parameter `name` of `target`; None if it is unknown."""
    try:
        return inspect.signature(target).parameters[name].default  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError):
        return None


def _given(node: torch.fx.Node) -> dict[str, Any]:
    """Return the arguments that the call `node` gives, by parameter name."""
    return {**dict(zip(_parameters(node.target), node.args, strict=False)), **node.kwargs}


def written_memory(graph: torch.fx.Graph) -> set[int]:
    """Return the ids of the storages that a graph writes, including writes in its body graphs, to views and through `.data`."""
    return {storage for node in graph.nodes for target in (*written(node), *_unsaid_in_bodies(node)) for storage in memory_of(target)}


def written_inputs(graph: torch.fx.Graph) -> frozenset[int]:
    """Return the positions of the inputs whose memory the graph writes, including writes to views and through `.data`."""
    memory = written_memory(graph)
    return frozenset(place for place, node in enumerate(graph.find_nodes(op="placeholder")) if not memory.isdisjoint(memory_of(node)))


def _unsaid_in_bodies(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
    """Return the operands that `node`, or an op in its body graphs, writes although the op's name does not show it (`written_unsaid`)."""
    return _written_by_bodies(node, _unsaid_in_bodies) if is_higher_order(node.target) else written_unsaid(node)


def _written_by_schema(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the operands that an ATen or custom op writes, by its schema."""
    target: Any = node.target
    if isinstance(target, OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else None)
            yield from _nodes_in(given)


def bodies(node: torch.fx.Node) -> list[torch.fx.GraphModule]:
    """Return the body graphs of a higher-order op (checkpoint, loop, condition); [] for any other node."""
    owner = node.graph.owning_module
    if owner is None or not is_higher_order(node.target):
        return []
    found = [getattr(owner, str(argument.target), None) for argument in node.all_input_nodes if argument.op == "get_attr"]
    return [body for body in found if isinstance(body, torch.fx.GraphModule)]


def _written_by_bodies(node: torch.fx.Node, write: Callable[[torch.fx.Node], Iterable[torch.fx.Node]] = written) -> list[torch.fx.Node]:
    """Return the operands that the body graphs of a higher-order op write. `write(node)` returns the operands that one node writes.

    For other ops than checkpoints it is not known which operand a body input receives: all operands are returned if a body writes an input.
    """
    operands = [a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, torch.fx.Node) and tensors(example_value(a))]
    if "mutation" in node.target.name():  # type: ignore[union-attr]
        return operands
    found: list[torch.fx.Node] = []
    for body in bodies(node):
        memory = {storage for inner in body.graph.nodes for target in write(inner) for storage in memory_of(target)}
        inputs = body.graph.find_nodes(op="placeholder")
        places = [place for place, inner in enumerate(inputs) if memory & memory_of(inner)]
        if is_checkpoint(node):
            found += [a for place in places if isinstance(a := node.args[place + 1], torch.fx.Node)]
        elif places:
            found += operands
    return list(dict.fromkeys(found))


PULL_BACK = torch._functorch.eager_transforms._autograd_grad
"""Function that computes the gradients if a model calls the function that torch.func.vjp returns, maybe outside of all transforms."""


def takes_gradients(graph: torch.fx.Graph) -> bool:
    """True if `graph` takes gradients: it calls torch.autograd, or a pullback (the function that torch.func.vjp returns).

    Also true if the graph returns a value from inside a transform such as vjp: a pullback that is called later may then differentiate it.
    A pullback inside a torch.func transform counts only if it reads values from outside of the transform.
    """
    if any(node.target in (torch.autograd.grad, torch.autograd.backward, "backward") for node in graph.nodes):
        return True
    around = transform_openings(graph)
    pulled = graph.find_nodes(op="call_function", target=PULL_BACK)
    if pulled and not around.keys() >= {*pulled, *tree_leaves([each.args[:2] for each in pulled])}:
        return True
    returned = (each for output in graph.find_nodes(op="output") for each in output.all_input_nodes if around)
    if any(any(map(_opens_grad, around.get(each, ()))) and not _name(each).endswith(_UNWRAPS) for each in returned):
        return True
    return any(takes_gradients(body.graph) for node in graph.nodes for body in bodies(node))


def differentiates(graph: torch.fx.Graph) -> bool:
    """True if `graph` computes gradients, by torch.autograd or torch.func. Under no_grad such a graph fails or returns zeros."""
    return takes_gradients(graph) or any(map(_opens_grad, graph.nodes))


_UNWRAPS = ("_unwrap_for_grad", "_remove_batch_dim")
"""Suffixes of the names of the ops that take a result out of a torch.func transform."""


def _opens_grad(node: torch.fx.Node) -> bool:
    return _name(node).endswith("_grad_increment_nesting")


def _name(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", ""))


def named_arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by parameter name, as far as names are known. A parameter that is not given has None."""
    return {**dict.fromkeys(_parameters(node.target)), **_given(node)}


def place_operands(graph: torch.fx.Graph) -> None:
    """Pass the first operand of each call by position, and sort its keywords as in the signature: passes find operands by their order.

    For example, `torch.exp(input=x)` becomes `torch.exp(x)`.
    """
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or not node.kwargs or is_higher_order(node.target):
            continue
        names = _parameters(node.target)
        order = {name: place for place, name in enumerate(names)}
        given = dict(sorted(node.kwargs.items(), key=lambda item: order.get(item[0], len(order))))
        first = next((name for name in (*names[:1], "input" if names[:1] == ("self",) else "") if name in given), None)
        if not node.args and first is not None and _by_position(node.target, first):
            node.args = (given.pop(first),)
        node.kwargs = given


def _by_position(target: Callable[..., Any], name: str) -> bool:
    """True if `target` accepts its parameter `name` by position, or if its signature is unknown, as for many builtins."""
    try:
        return inspect.signature(target).parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY
    except (KeyError, TypeError, ValueError):
        return True


def set_argument(node: torch.fx.Node, place: int, name: str, value: Any) -> None:
    """Set an argument of an op: at position `place` if the call gives it by position, otherwise by the keyword `name`."""
    if len(node.args) > place:
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


@lru_cache(maxsize=1024)
def _parameters(target: Callable[..., Any] | str) -> tuple[str, ...]:
    """Return the names of the parameters of `target`, in order; () if they are unknown."""
    if isinstance(target, OpOverload):
        return tuple(argument.name for argument in target._schema.arguments)
    of_operators = getattr(target, "__module__", "") == "_operator"  # functions of `operator` call their parameters a and b, unlike ATen
    if callable(target) and not isinstance(target, OpOverloadPacket) and not of_operators:
        try:
            names = tuple(inspect.signature(target).parameters)
        except (ValueError, TypeError):
            names = ()  # some builtins have no signature
        if names and names != ("args", "kwargs"):  # `F.max_pool2d` has (*args, **kwargs), because it picks one of two functions
            return names
    packet = getattr(torch.ops.aten, op_name(target), None)
    return _parameters(getattr(packet, packet.overloads()[0])) if packet is not None else ()


def note_autocast(facts: dict[torch.fx.Node, Fact]) -> None:
    """Set `Fact.autocast` of nodes inside the model's own autocast regions: "on" if the innermost one enables autocast, otherwise "off"."""
    for node, opening in _autocast_openings(facts).items():
        facts[node].autocast = "on" if opening.args[2] else "off"


def in_autocast(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the nodes in the model's own autocast regions, enabled or not. These regions fix the formats of their ops."""
    return set(_autocast_openings(graph.nodes))


def _autocast_openings(nodes: Iterable[torch.fx.Node]) -> dict[torch.fx.Node, torch.fx.Node]:
    """Return {node: op that opens the innermost autocast region around it}. A region for another device than the node's does not count."""
    stack, found = list[torch.fx.Node](), dict[torch.fx.Node, torch.fx.Node]()
    for node in nodes:
        op = op_name(node.target)
        if op == ENTER_AUTOCAST:
            stack.append(node)
        elif op == EXIT_AUTOCAST:
            stack = [opening for opening in stack if opening is not node.args[0]]
        elif stack:
            value = example_value(node)
            around = [opening for opening in stack if opening.args[0] == device_of(value) or not tensors(value)]
            found |= {node: around[-1]} if around else {}
    return found


def transform_regions(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """Return {node: node that opens the outermost transform around it} for all nodes inside torch.func transforms (vmap, grad, jvp)."""
    return {node: around[0] for node, around in transform_openings(graph).items()}


def transformed_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the nodes inside torch.func transforms (vmap, grad, jvp)."""
    return set(transform_regions(graph))


def transform_openings(graph: torch.fx.Graph) -> dict[torch.fx.Node, tuple[torch.fx.Node, ...]]:
    """Return {node: nodes that open the transforms around it, outermost first} for all nodes inside torch.func transforms."""
    around, found = list[torch.fx.Node](), {}
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", ""))
        around += [node] if name.endswith(OPENS) else []
        if around:
            found[node] = tuple(around)
        del around[len(around) - name.endswith(CLOSES) :]
    return found


Openings = Mapping[torch.fx.Node, tuple[torch.fx.Node, ...]]
"""{node: nodes that open the torch.func transforms around it, outermost first}, as `transform_openings` returns it."""


def outside(openings: Openings, value: torch.fx.Node, user: torch.fx.Node) -> torch.fx.Node:
    """Return the node before which to insert a copy of `value` for `user`, so that the copy enters no torch.func transform.

    If transforms contain `user` but not `value`, return the op that opens the outermost of these transforms. Otherwise return `user`.
    """
    around = openings.get(value, ())
    return next((opening for opening in openings.get(user, ()) if opening not in around), user)


@lru_cache(maxsize=1024)
def is_higher_order(target: Callable[..., Any] | str) -> bool:
    return isinstance(target, HigherOrderOperator)


def is_opaque(node: Any) -> bool:
    """True if `node` runs a higher-order op."""
    return isinstance(node, torch.fx.Node) and is_higher_order(node.target)


def arguments(node: torch.fx.Node) -> list[tuple[str, torch.fx.Node]]:
    """Return (parameter name, node) for every node among the arguments of `node`. The name is "" if it is unknown."""
    found: list[tuple[str, torch.fx.Node]] = []
    names = _parameters(node.target) if node.op in ("call_function", "call_method") else ()
    for name, argument in (*zip_longest(names[: len(node.args)], node.args, fillvalue=""), *node.kwargs.items()):
        for leaf in (argument,) if isinstance(argument, torch.fx.Node) else _nodes_in(argument):
            found.append((name, leaf))
    return found


def device_of(value: Any) -> str:
    """Return the device type of the first tensor in `value`; "cpu" if it has no tensor."""
    found = tensors(value)
    return found[0].device.type if found else "cpu"
