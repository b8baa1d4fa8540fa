"""fx graph → op graph: one vertex an op, with dtype, shape, device, source line and module path as facts.

1. Read facts from the example values that capture left on the nodes.
2. Tell which operands follow an op's colour, from its row in the op table.
3. Pin what facts decide: inputs, parameters, explicit dtypes, autocast regions, opaque graphs, kernels that do not exist.
4. Tie what shares memory that is written in place, and what comes out of one kernel.
5. Name and order canonically: depth first from the outputs, so that the order of the fx nodes changes nothing.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import torch
import torch.fx
from torch.utils._pytree import tree_leaves

from amprewrite.colour import Colour, OpKind, Reason
from amprewrite.formats import Format, dtype_name
from amprewrite.op_graph import Demand, Operand, OpGraph, OpNode
from amprewrite.oplists import Op, OpLists, find_op, is_inplace, op_name
from amprewrite.source_text import dtype_is_literal, location

CONVERSIONS = {"to", "type", "type_as", "float", "_to_copy", "convert_element_type"}
"""Ops that change a dtype and nothing else."""
TAKES_SHAPE_ONLY = {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones",
                    "new_full", "new_empty"}  # fmt: skip
"""Ops that take a shape, and unless told otherwise the dtype, of another tensor."""
ABSOLUTE = {"float"}
"""Conversions that are always spelled out."""
ROLES = {"placeholder", "get_attr", "output"}
FUNCTORCH = ("_increment_nesting", "_decrement_nesting")
"""Ends of the names of the ops that open and close a torch.func transform."""
ENTER_AUTOCAST, EXIT_AUTOCAST = "_enter_autocast", "_exit_autocast"
_CONSTANT_SENSITIVE = {"add", "sub", "rsub", "clamp", "clamp_min", "maximum", "div", "mul", "full", "full_like", "fill"}


@dataclass
class _Fact:
    """What is read off one fx node before it becomes a vertex."""

    node: torch.fx.Node
    position: int
    op: str
    row: Op | None
    role: str
    value: Any
    dtype: str
    writes: tuple[torch.fx.Node, ...] = ()
    autocast: str = ""
    transformed: bool = False
    pinned: tuple[Colour, Reason, str] | None = None
    relative: bool = False
    free_source: bool = False
    kind: OpKind | None = None
    huge: bool = False
    name: str = ""
    rank: int = 0
    operands: list[Operand] = field(default_factory=list)


def read_graph(
    module: torch.fx.GraphModule, low: Format, lists: OpLists, entry: str = "", names: tuple[str, ...] = (), training: bool = False
) -> tuple[OpGraph, dict[str, torch.fx.Node]]:
    """The op graph of `module` and the fx node of each vertex.

    `low` is the low format, `lists` say the kind of each op, `entry` is the path of the module that was called, `names` are
    the names of its positional parameters, `training` says whether a backward may follow.
    """
    facts = {node: _fact(node, position) for position, node in enumerate(module.graph.nodes)}
    _note_autocast(facts)
    for node in transformed_nodes(module.graph):
        facts[node].transformed = True
    ties, epochs = _memory(facts)
    _name_all(facts, entry, names)
    no_grad = _without_grad(module.graph) if training else set()
    for fact in facts.values():
        kind = fact.kind = _kind(fact, lists, low)
        fact.operands = _operands(fact, facts, kind, epochs, fact.node in no_grad)
        fact.pinned = _pin(fact, kind, low, ties, training)
        fact.huge = _is_huge(fact, facts, low)
    _absorb_explicit_internal(facts, lists)
    order = _canonical_order(facts)
    graph = OpGraph.of(_vertex(facts[node], lists, ties, entry) for node in order)
    return graph, {facts[node].name: node for node in order}


def _kind(fact: _Fact, lists: OpLists, low: Format) -> OpKind | None:
    """What the lists say of the op as it is called here.

    Two things the name alone cannot tell: squares and cubes keep their relative error and in bf16 their range, and a
    power that only a tanh reads (GELU) may overflow without harm.
    """
    if fact.row is None:
        return None
    kind = lists.kind(fact.row.name)
    if kind is None and fact.op in CONVERSIONS:
        return OpKind.CLEAR  # to the dtype it has already, but for those with facts of their own
    if kind is None and lists.rule == "local":
        return OpKind.INFER  # torch.autocast lets it follow its inputs
    if kind is OpKind.DENY and lists.rule == "cost" and fact.op == "pow" and fact.node.args[1:] and fact.node.args[1] in (2, 3):
        small = low.max > 1e30 or _only_tanh_reads(fact.node)
        return OpKind.INFER if small and fact.row.name not in lists.asked else kind
    return kind


def _only_tanh_reads(node: torch.fx.Node, steps: int = 4) -> bool:
    """Whether products and sums lead from `node` to tanh and to nothing else."""
    names = {op_name(user.target) for user in node.users}
    if names == {"tanh"}:
        return True
    return steps > 0 and bool(names) and names <= {"add", "mul"} and all(_only_tanh_reads(user, steps - 1) for user in node.users)


def _without_grad(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Nodes that the model runs under its own no_grad."""
    found, enabled = set(), True
    for node in graph.nodes:
        if op_name(node.target) in ("_set_grad_enabled", "set_grad_enabled"):
            enabled = bool(node.args[0])
        elif not enabled:
            found.add(node)
    return found


# -- 1. facts ---------------------------------------------------------------------
def example_value(node: torch.fx.Node) -> Any:
    """What capture says the node gives: a fake tensor, a structure of them, or None."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def value_dtype(value: Any) -> str:
    """Name of the dtype of a value's floating tensors, or of all its tensors where none is floating."""
    every = tensors(value)
    floating = [t for t in every if t.is_floating_point() or t.is_complex()]
    names = {dtype_name(t.dtype) if t.layout == torch.strided else f"sparse {dtype_name(t.dtype)}" for t in floating or every}
    return "+".join(sorted(names))


def hint(size: Any) -> int:
    """A size as a plain int without making a guard: symbolic sizes give their hint."""
    if isinstance(size, int):
        return size
    known = getattr(getattr(size, "node", None), "_hint", None)
    return int(known) if isinstance(known, int) else 64


def _fact(node: torch.fx.Node, position: int) -> _Fact:
    op = op_name(node.target) if node.op in ("call_function", "call_method") else ""
    row = find_op(op) if op else None
    value = example_value(node)
    fact = _Fact(node, position, row.name if row else op or node.op, row, _role(node, value), value, value_dtype(value))
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        fact.dtype = ""  # what it gives is read off its getitems
    fact.writes = _written(node)
    if value is None and fact.writes:  # setitem and the like give nothing: they stand for what they write
        fact.value = example_value(fact.writes[0])
        fact.dtype = value_dtype(fact.value)
    return fact


def _role(node: torch.fx.Node, value: Any) -> str:
    if node.op == "output":
        return "output"
    if node.op not in ROLES:
        return "op"
    source = source_name(node)
    held = _held(node) if node.op == "get_attr" else None
    if isinstance(value, torch.nn.Parameter) or isinstance(held, torch.nn.Parameter) or "_parameters[" in source:
        return "parameter"
    if "_buffers[" in source or (isinstance(held, torch.Tensor) and _is_buffer(node)):
        return "buffer"
    return "constant" if node.op == "get_attr" else "input"


def _held(node: torch.fx.Node) -> Any:
    """What a get_attr node reads."""
    held: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        held = getattr(held, part, None)
    return held


def _is_buffer(node: torch.fx.Node) -> bool:
    path, _, last = str(node.target).rpartition(".")
    owner = node.graph.owning_module
    return owner is not None and last in owner.get_submodule(path)._buffers


def source_name(node: torch.fx.Node) -> str:
    """Where Dynamo found a graph input: "L['self']._modules['fc']._parameters['weight']"; "" elsewhere."""
    arg = node.meta.get("grapharg")
    source = getattr(arg, "source", None)
    name = getattr(source, "name", "")
    return name() if callable(name) else name


def _written(node: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
    """Tensors that the node writes in place."""
    written = [a for a in tree_leaves(node.kwargs.get("out")) if isinstance(a, torch.fx.Node)]
    first = node.args[0] if node.args else None
    if isinstance(first, torch.fx.Node) and node.op in ("call_function", "call_method"):
        inplace = is_inplace(node.target)
        if not inplace and node.op == "call_function" and "inplace" in _parameters(node.target):
            at = _parameters(node.target).index("inplace")
            inplace = node.kwargs.get("inplace", node.args[at] if at < len(node.args) else False) is True
        if inplace and tensors(example_value(first)):
            written.append(first)
    return tuple(written)


@lru_cache(maxsize=1024)
def _parameters(target: Callable[..., Any] | str) -> tuple[str, ...]:
    """Names of the parameters a target takes, in order; () where nobody knows."""
    if isinstance(target, torch._ops.OpOverload):
        return tuple(argument.name for argument in target._schema.arguments)
    if callable(target) and not isinstance(target, torch._ops.OpOverloadPacket):
        try:
            return tuple(inspect.signature(target).parameters)
        except (ValueError, TypeError):
            pass  # a builtin: its ATen schema has the names
    packet = getattr(torch.ops.aten, op_name(target), None)
    return _parameters(getattr(packet, packet.overloads()[0])) if packet is not None else ()


def _note_autocast(facts: dict[torch.fx.Node, _Fact]) -> None:
    """Mark nodes inside the model's own autocast regions: "on" or "off"."""
    stack: list[tuple[torch.fx.Node, str]] = []
    for node, fact in facts.items():
        if fact.op == ENTER_AUTOCAST:
            stack.append((node, "on" if node.args[2] else "off"))
        elif fact.op == EXIT_AUTOCAST:
            stack = [entry for entry in stack if entry[0] is not node.args[0]]
        elif stack:
            fact.autocast = stack[-1][1]


def transformed_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Nodes inside a torch.func transform (vmap, grad, jvp): their values exist at a level of their own."""
    depth, found = 0, set()
    for node in graph.nodes:
        opens, closes = (str(getattr(node.target, "__name__", "")).endswith(end) for end in FUNCTORCH)
        depth += opens
        if depth:
            found.add(node)
        depth -= closes
    return found


def _is_opaque(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and isinstance(node.target, torch._ops.HigherOrderOperator)


# -- 4. memory ------------------------------------------------------------------------
def _storage(value: Any) -> set[int]:
    found = set()
    for tensor in tensors(value):
        if tensor.layout == torch.strided:
            found.add(tensor.untyped_storage()._cdata)
    return found


class _Union:
    def __init__(self) -> None:
        self.parent: dict[Any, Any] = {}

    def find(self, x: Any) -> Any:
        self.parent.setdefault(x, x)
        while self.parent[x] != x:
            self.parent[x] = self.parent[self.parent[x]]
            x = self.parent[x]
        return x

    def join(self, a: Any, b: Any) -> None:
        self.parent[self.find(a)] = self.find(b)


@dataclass
class _Ties:
    """Which nodes share a colour, and which of those groups write a model input, parameter or buffer."""

    group: dict[torch.fx.Node, torch.fx.Node]
    writes_state: set[torch.fx.Node]
    size: Counter[torch.fx.Node]


def _memory(facts: dict[torch.fx.Node, _Fact]) -> tuple[_Ties, Callable[[torch.fx.Node, _Fact], int]]:
    writes: dict[int, list[int]] = defaultdict(list)
    for fact in facts.values():
        for target in fact.writes:
            for storage in _storage(example_value(target)):
                writes[storage].append(fact.position)
    union, state = _Union(), set()
    first: dict[int, torch.fx.Node] = {}
    for node, fact in facts.items():
        if fact.dtype != "fp32" or fact.role == "output":
            continue
        union.find(node)
        if fact.op == "getitem" and isinstance(node.args[0], torch.fx.Node) and isinstance(facts[node.args[0]].value, tuple | list):
            union.join(node, node.args[0])
        for storage in _storage(fact.value) if writes else ():
            if fact.position <= max(writes.get(storage, (-1,))):  # made after the last write: nothing is shared any more
                union.join(node, first.setdefault(storage, node))
    for node, fact in facts.items():
        if fact.role != "op" and fact.dtype == "fp32" and any(storage in writes for storage in _storage(fact.value)):
            state.add(union.find(node))
    group = {node: union.find(node) for node in list(union.parent)}

    def epoch(value: torch.fx.Node, reader: _Fact) -> int:
        if not writes:
            return 0
        return sum(position < reader.position for storage in _storage(facts[value].value) for position in writes.get(storage, ()))

    return _Ties(group, state, Counter(group.values())), epoch


# -- 2. operands ------------------------------------------------------------------------
def _arguments(node: torch.fx.Node) -> Iterator[tuple[str, torch.fx.Node]]:
    """Every node among the arguments, with the name of the parameter it is passed to ("" where unknown)."""
    names = _parameters(node.target) if node.op in ("call_function", "call_method") else ()
    for position, argument in enumerate(node.args):
        name = names[position] if position < len(names) else ""
        yield from ((name, leaf) for leaf in tree_leaves(argument) if isinstance(leaf, torch.fx.Node))
    for name, argument in node.kwargs.items():
        yield from ((name, leaf) for leaf in tree_leaves(argument) if isinstance(leaf, torch.fx.Node))


def _operands(
    fact: _Fact,
    facts: dict[torch.fx.Node, _Fact],
    kind: OpKind | None,
    epochs: Callable[[torch.fx.Node, _Fact], int],
    without_grad: bool,
) -> list[Operand]:
    """The fp32 tensors an op reads. Copies are shared within an epoch, and never between no_grad code and the rest."""
    found: dict[torch.fx.Node, Operand] = {}
    for parameter, node in _arguments(fact.node):
        feeder = facts[node]
        if feeder.dtype != "fp32" or node in found:
            continue
        scalar = isinstance(feeder.value, torch.Tensor) and feeder.value.dim() == 0
        epoch = 2 * epochs(node, fact) + without_grad
        found[node] = Operand(feeder.name, _demand(fact, parameter, kind, feeder), scalar, epoch)
    if sum(operand.demand is Demand.PROMOTE and not operand.scalar for operand in found.values()) < 2:
        return [replace(o, demand=Demand.COLOUR) if o.demand is Demand.PROMOTE and not o.scalar else o for o in found.values()]
    return list(found.values())


def _demand(fact: _Fact, parameter: str, kind: OpKind | None, feeder: _Fact) -> Demand:
    row = fact.row
    if fact.role == "output" or fact.autocast or fact.transformed or row is None or kind is None:
        return Demand.ANY if fact.role == "op" and fact.op == "getattr" else Demand.HIGH
    if fact.op == "getitem" and not isinstance(feeder.value, torch.Tensor):
        return Demand.COLOUR
    if fact.dtype != "fp32":
        return Demand.ANY if kind is OpKind.CLEAR and fact.op not in CONVERSIONS and "fp" not in fact.dtype else Demand.HIGH
    if fact.op in TAKES_SHAPE_ONLY or (fact.op == "type_as" and parameter == "other"):
        return Demand.ANY
    if fact.op == "to" and feeder is not None and parameter not in ("self", "input", "") and fact.node.args[0] is not feeder.node:
        return Demand.ANY
    if row.data and parameter not in row.data:
        device = _device(feeder.value)
        return Demand.HIGH if device in row.mixed_on else Demand.COLOUR
    return Demand.PROMOTE if row.promotes else Demand.COLOUR


def _device(value: Any) -> str:
    found = tensors(value)
    return found[0].device.type if found else "cpu"


# -- 3. pins -----------------------------------------------------------------------------
def _pin(fact: _Fact, kind: OpKind | None, low: Format, ties: _Ties, training: bool) -> tuple[Colour, Reason, str] | None:
    """The colour that facts force; None where lists and passes decide."""
    if fact.role == "output" or fact.dtype != "fp32":
        return Colour.PLAIN, Reason.NO_FLOAT, ""
    if fact.role != "op":
        return Colour.HIGH, Reason.PARAMETER if fact.role == "parameter" else Reason.BOUNDARY, fact.role
    if fact.autocast:
        return Colour.HIGH, Reason.INSIDE_AUTOCAST, f"enabled={fact.autocast == 'on'}"
    if fact.transformed:
        return Colour.HIGH, Reason.OPAQUE, "inside a torch.func transform"
    if fact.op == "getitem" and _is_opaque(fact.node.args[0]):
        return Colour.HIGH, Reason.OPAQUE, op_name(fact.node.args[0].target)
    if fact.row is None or kind is None:
        return Colour.HIGH, Reason.UNLISTED, fact.op
    if fact.node in ties.group and ties.group[fact.node] in ties.writes_state:
        return Colour.HIGH, Reason.WRITES_STATE, ""
    if "out" in fact.node.kwargs and fact.node.kwargs["out"] is not None:
        return Colour.HIGH, Reason.WRITES_STATE, "out="
    device = _device(fact.value)
    if f"{device}:{low.name}" in fact.row.no_kernel:
        return Colour.HIGH, Reason.NO_KERNEL, f"{fact.op} in {low.name} on {device}"
    if training and kind is OpKind.CLEAR and device in fact.row.low_backward:
        return Colour.HIGH, Reason.LOW_BACKWARD, f"{fact.op} on {device}"
    return _pin_dtype(fact) or _pin_source(fact) or _pin_constant(fact, low)


def _pin_dtype(fact: _Fact) -> tuple[Colour, Reason, str] | None:
    """A dtype argument spelled out in the source keeps fp32; one taken from another tensor makes the node relative."""
    node = fact.node
    if fact.op in ABSOLUTE:
        return Colour.HIGH, Reason.EXPLICIT_DTYPE, "float()"
    asks = torch.float32 in tree_leaves((node.args, node.kwargs))
    if fact.op in CONVERSIONS or asks:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if asks and dtype_is_literal(node.stack_trace, target.split(".")[0]):
            _read_anything(fact)
            return Colour.HIGH, Reason.EXPLICIT_DTYPE, "torch.float32"
        fact.relative = fact.op in CONVERSIONS
        if not fact.relative and asks:
            _read_anything(fact)
            return Colour.HIGH, Reason.EXPLICIT_DTYPE, "dtype argument"
    return None


def _read_anything(fact: _Fact) -> None:
    """An op told its result's dtype converts its input itself."""
    if fact.op not in CONVERSIONS:
        fact.operands = [replace(o, demand=Demand.ANY) for o in fact.operands]


def _pin_source(fact: _Fact) -> tuple[Colour, Reason, str] | None:
    """An op that makes fp32 from no fp32 operand stays as it is, but for masks: booleans convert exactly."""
    if fact.operands:
        return None
    first = fact.node.args[0] if fact.node.args else None
    exact = isinstance(first, torch.fx.Node) and value_dtype(example_value(first)) == "bool"
    if fact.op in CONVERSIONS and fact.relative and exact and torch.float32 in tree_leaves((fact.node.args, fact.node.kwargs)):
        fact.free_source = True
        return None
    return Colour.HIGH, Reason.BOUNDARY, "makes fp32 from other types"


def _constants(node: torch.fx.Node) -> list[float]:
    return [float(leaf) for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, float) and math.isfinite(leaf)]


def _pin_constant(fact: _Fact, low: Format) -> tuple[Colour, Reason, str] | None:
    """A constant that the low format flushes to zero, or an arithmetic one beyond its range, keeps its op high."""
    if fact.op not in _CONSTANT_SENSITIVE:
        return None
    for constant in _constants(fact.node):
        size = abs(constant)
        if 0 < size < low.smallest_subnormal and fact.op != "mul":
            return Colour.HIGH, Reason.CONSTANT, f"{constant:g} vanishes in {low.name}"
        if size > low.max and fact.op in ("mul", "add", "sub", "div"):
            return Colour.HIGH, Reason.CONSTANT, f"{constant:g} exceeds {low.name}"
    return None


def _is_huge(fact: _Fact, facts: dict[torch.fx.Node, _Fact], low: Format) -> bool:
    if fact.role != "op" or fact.dtype != "fp32" or fact.row is None:
        return False
    if fact.row.kind in (OpKind.ALLOW, OpKind.INTERNAL, OpKind.DENY):
        return False
    if any(abs(constant) > low.max for constant in _constants(fact.node)):
        return True
    return any(facts[node].huge for _, node in _arguments(fact.node))


def _absorb_explicit_internal(facts: dict[torch.fx.Node, _Fact], lists: OpLists) -> None:
    """`softmax(x.float()).to(x.dtype)` asks for what an internal kernel does anyway: let it run low in, low out.

    Holds only where every reader of the fp32 result is a cast back to a dtype taken from another tensor, so that nobody
    ever sees the fp32 bits, and the lists let the op compute internally.
    """

    def internal(fact: _Fact) -> bool:
        return fact.row is not None and lists.rule == "cost" and lists.kind(fact.row.name) is OpKind.INTERNAL and fact.dtype == "fp32"

    def all_cast_back(node: torch.fx.Node) -> bool:
        return bool(node.users) and all(_casts_back(facts[user]) for user in node.users)

    for node, fact in facts.items():
        explicit = fact.pinned is not None and fact.pinned[1] is Reason.EXPLICIT_DTYPE
        if explicit and internal(fact) and all_cast_back(node):
            fact.pinned = None
            fact.operands = [replace(o, demand=Demand.COLOUR) for o in fact.operands]
    for node, fact in facts.items():
        explicit = fact.pinned is not None and fact.pinned[1] is Reason.EXPLICIT_DTYPE
        if explicit and fact.op in CONVERSIONS and fact.operands and node.users:
            readers = [facts[user] for user in node.users]
            if all(_casts_back(r) or (internal(r) and r.pinned is None and all_cast_back(r.node)) for r in readers):
                fact.pinned, fact.relative = None, True


def _casts_back(fact: _Fact) -> bool:
    return fact.relative and fact.pinned is None


# -- 5. names and order --------------------------------------------------------------------
_PATH = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]|\.(\w+)|\[['\"]?([^'\"\]]+)['\"]?\]")


def module_path(node: torch.fx.Node, entry: str) -> str:
    """Path of the module that the node was called in, from the root of the rewritten model."""
    stack = node.meta.get("nn_module_stack")
    inner = ""
    if stack:
        inner = clean_path(next(reversed(stack.values()))[0])
    return ".".join(part for part in (entry, inner) if part)


def clean_path(text: str) -> str:
    """"L['self']._modules['net']._modules['0']", "L['self'].net.0" and "L__self___net_0" style roots removed: "net.0"."""
    text = re.sub(r"^(?:L|G)\['[^']*'\]", "", text)
    if not text.startswith((".", "[")):
        return text
    return ".".join(next(filter(None, match)) for match in _PATH.findall(text) if next(filter(None, match)) not in _PRIVATE)


_PRIVATE = {"_modules", "_parameters", "_buffers", "__self__"}


def _base_name(fact: _Fact, entry: str, names: tuple[str, ...]) -> str:
    node = fact.node
    if not fact.dtype and fact.role in ("op", "input") and not isinstance(node.target, torch._ops.HigherOrderOperator):
        return f"size_{fact.op}" if fact.role == "op" else "size"  # they come and go with symbolic shapes
    if fact.role == "op":
        return fact.op
    if fact.role == "output":
        return "output"
    if node.op == "get_attr":
        return str(node.target)
    source = source_name(node)
    path = clean_path(source)
    if fact.role in ("parameter", "buffer") and path:
        return ".".join(part for part in (entry, path) if part)
    positional = re.fullmatch(r"L\['args'\]\[(\d+)\]", source)
    if positional and int(positional[1]) < len(names):
        return names[int(positional[1])]
    words = re.findall(r"'([^']+)'", source)
    return words[-1] if words else str(node.target)


def _canonical_order(facts: dict[torch.fx.Node, _Fact]) -> list[torch.fx.Node]:
    return sorted(facts, key=lambda node: facts[node].rank)


def _depth_first(facts: dict[torch.fx.Node, _Fact]) -> list[torch.fx.Node]:
    """Post-order from the outputs; then writes and other effects that no output reads, in graph order."""
    done: dict[torch.fx.Node, None] = {}
    outputs = [node for node in facts if node.op == "output"]
    effects = [node for node in facts if node.op != "output"]
    for root in (*(a for o in outputs for a in o.all_input_nodes), *effects, *outputs):
        stack = [(root, iter(root.all_input_nodes))]
        while stack:
            node, feeders = stack[-1]
            if node in done:
                stack.pop()
                continue
            feeder = next((f for f in feeders if f not in done), None)
            if feeder is None:
                done[node] = None
                stack.pop()
            else:
                stack.append((feeder, iter(feeder.all_input_nodes)))
    return list(done)


def _name_all(facts: dict[torch.fx.Node, _Fact], entry: str, names: tuple[str, ...]) -> None:
    """Canonical ranks, and names by op and count: linear, linear_1, …"""
    counts: Counter[str] = Counter()
    for rank, node in enumerate(_depth_first(facts)):
        fact = facts[node]
        base = _base_name(fact, entry, names)
        fact.rank = rank
        fact.name = f"{base}_{counts[base]}" if counts[base] else base
        counts[base] += 1


def _vertex(fact: _Fact, lists: OpLists, ties: _Ties, entry: str) -> OpNode:
    node = fact.node
    found = tensors(fact.value)
    shape = tuple(found[0].shape) if found and isinstance(fact.value, torch.Tensor) else ()
    file, line = location(node.stack_trace) if fact.role == "op" else ("", 0)
    group = ties.group.get(node)
    tie = group.name if group is not None and ties.size[group] > 1 and fact.dtype == "fp32" else ""
    return OpNode(
        fact.name,
        fact.op if fact.role == "op" else fact.role,
        fact.kind,
        tuple(fact.operands),
        fact.dtype,
        tuple(s if isinstance(s, int) else str(s) for s in shape),
        sum(math.prod(hint(s) for s in t.shape) for t in found),
        flops(fact.op, fact.node),
        found[0].device.type if found else "",
        module_path(node, entry) if fact.role == "op" else entry,
        f"{PurePath(file).name}:{line}" if file else "",
        fact.role,
        fact.pinned,
        tie,
        fact.relative,
        fact.huge,
    )


def flops(op: str, node: torch.fx.Node) -> int:
    """Multiply-adds times two of a matmul, convolution or attention, from shapes; 0 for anything else."""
    shapes = [tuple(hint(s) for s in t.shape) for a in node.all_input_nodes for t in tensors(example_value(a))[:1]]
    out = [math.prod(hint(s) for s in t.shape) for t in tensors(example_value(node))[:1]]
    if not out or not shapes or not shapes[0]:
        return 0
    if op in ("linear", "matmul", "bmm", "mm", "mv", "dot"):
        return 2 * out[0] * shapes[0][-1]
    if op in ("addmm", "baddbmm", "addbmm", "addmv") and len(shapes) > 1 and shapes[1]:
        return 2 * out[0] * shapes[1][-1]
    if op == "scaled_dot_product_attention" and len(shapes) > 1:
        return 4 * math.prod(shapes[0]) * shapes[1][-2]
    if op.startswith("conv") and len(shapes) > 1 and len(shapes[1]) > 1:
        moved = math.prod(shapes[0]) if "transpose" in op else out[0]
        return 2 * moved * math.prod(shapes[1]) // max(shapes[1][0], 1)
    if op in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        steps = math.prod(shapes[0][:-1])
        return 2 * steps * sum(math.prod(s) for s in shapes[1:] if len(s) == 2)
    return 0


__all__ = ["example_value", "flops", "read_graph", "tensors", "value_dtype"]
