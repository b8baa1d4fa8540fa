"""Read the calls of an fx graph: arguments and shapes of every op as plain data, and the reasons why some ops must not be padded.

This file has special code for `getitem`, which may pick one of several results, and for `batch_norm` (`_call` gives the reason).

`read_matrix_products` finds the products of rows and a matrix, whose operands may be quantised to fp8: `linear`, `matmul`, `mm` and
`addmm`. It leaves out products inside a torch.func transform, products of a tensor with itself, products with further factors such as
`alpha`, and products plus a summand of more than one row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import (
    LEAVES,
    example_value,
    hint,
    memory_of,
    named_arguments,
    named_sizes,
    tensors,
    transformed_nodes,
    written,
)
from amprewrite.ir.cost import MatrixProduct
from amprewrite.ir.op_graph import Call, OpGraph, Ref, leaves
from amprewrite.tables.formats import Format, is_far
from amprewrite.tables.ops.op_lists import Trait, is_inplace, op_name, ops_with
from amprewrite.torch_internals.dispatch import is_traceable_wrapper_subclass


def read_calls(graph: OpGraph, fx_nodes: Mapping[str, torch.fx.Node]) -> dict[str, Call]:
    """Return the `Call` (op, arguments and shapes as plain data) of every node of `graph`, by name, in the order of the fx graph."""
    names = {node: name for name, node in fx_nodes.items()}
    if not names:
        return {}
    module_graph = next(iter(names)).graph
    transformed = transformed_nodes(module_graph)
    opaque = _aliased_writes(module_graph, transformed)
    opaque |= _moved_in_place(module_graph)
    opaque |= dict.fromkeys(transformed, "it runs inside a torch.func transform")
    opaque |= dict.fromkeys((node for node in module_graph.nodes if LEAVES in node.meta), "others see this value itself, or its memory")
    return {names[node]: _call(graph, names[node], node, names, opaque.get(node, "")) for node in module_graph.nodes if node in names}


NORMS = ops_with(Trait.RUNNING_STATISTICS)
STATISTICS_AND_WEIGHTS = ((1, "running_mean"), (2, "running_var"), (3, "weight"), (4, "bias"))
"""Positions and names of the arguments that batch and instance norms have in common."""


def read_bare_norms(nodes: Mapping[str, torch.fx.Node]) -> tuple[str, ...]:
    """Return the names of the batch and instance norms on a CPU whose running statistics, weight and bias are all None.

    The CPU kernel then computes the statistics in the dtype of the input, so a low input would get low statistics.
    """
    return tuple(name for name, node in nodes.items() if op_name(node.target) in NORMS and _is_bare(node))


def _is_bare(node: torch.fx.Node) -> bool:
    value = example_value(node)
    on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return on_cpu and all((node.args[at] if len(node.args) > at else node.kwargs.get(name)) is None for at, name in STATISTICS_AND_WEIGHTS)


def read_far_constants(nodes: Mapping[str, torch.fx.Node], low: Format) -> tuple[str, ...]:
    """Return the names of the ops that have a finite constant beyond the range of `low` among their arguments."""
    arguments = {name: (node.args, tuple(node.kwargs.values())) for name, node in nodes.items()}
    return tuple(name for name, given in arguments.items() if any(is_far(leaf, low) for leaf in leaves(given)))


def _call(graph: OpGraph, name: str, node: torch.fx.Node, names: Mapping[torch.fx.Node, str], opaque: str) -> Call:
    vertex, value = graph[name], example_value(node)
    found = tensors(value)
    if any(is_traceable_wrapper_subclass(t) or t.layout != torch.strided for t in found):
        opaque = opaque or "its tensor is no plain strided one"
    args, kwargs = node.args, node.kwargs
    if vertex.op == "batch_norm":  # pass operands by name: torch.batch_norm and F.batch_norm order them differently
        args, kwargs = (), {parameter: each for parameter, each in named_arguments(node).items() if each is not None}
    of_tuple = vertex.op == "getitem" and node.args and not isinstance(example_value(node.args[0]), torch.Tensor)  # type: ignore[arg-type]
    return Call(
        name,
        vertex.op,
        _plain(args, names),
        _plain(kwargs, names),
        tuple(map(named_sizes, found)),
        not isinstance(value, torch.Tensor),
        bool(found) and all(t.is_floating_point() for t in found),
        node.args[1] if of_tuple and isinstance(node.args[1], int) else None,
        opaque,
        vertex.role,
    )


def _plain(argument: Any, names: Mapping[torch.fx.Node, str]) -> Any:
    """Return an argument without fx nodes: a node becomes its value if capture knows it as a number, otherwise a `Ref` with its name."""
    if isinstance(argument, torch.fx.Node):
        value = example_value(argument)
        return value if type(value) in (int, float, bool) else Ref(names.get(argument, argument.name))
    if isinstance(argument, slice):
        return slice(*(_plain(a, names) for a in (argument.start, argument.stop, argument.step)))
    if isinstance(argument, tuple | list):
        return tuple([_plain(a, names) for a in argument])
    if isinstance(argument, dict):
        return {key: _plain(a, names) for key, a in argument.items()}
    return argument


def _moved_in_place(graph: torch.fx.Graph) -> dict[torch.fx.Node, str]:
    """Return {node: why it must not be padded} for values that an op such as `unsqueeze_` reshapes in place, and for their readers."""
    found: dict[torch.fx.Node, str] = {}
    for node in graph.nodes:
        packet = getattr(torch.ops.aten, f"{op_name(node.target)}_", None) if is_inplace(node.target) else None
        if packet is not None and any(torch.Tag.inplace_view in getattr(packet, each).tags for each in packet.overloads()):
            for target in written(node):
                found |= dict.fromkeys((target, *target.users), "sizes of what it reads or gives are changed in place")
    return found


def _aliased_writes(graph: torch.fx.Graph, transformed: set[torch.fx.Node]) -> dict[torch.fx.Node, str]:
    """Return {node: why it must not be padded} for the nodes whose memory is written in place while another op may still read it.

    If no later op reads the memory, a write does not count, because the out-of-place op gives the same result. Writes to inputs and
    weights always count, and so do writes by ops that return nothing (setitem). Nodes in torch.func transforms (`transformed`) are skipped.
    """
    writes = [(node, targets) for node in graph.nodes if node not in transformed and (targets := written(node))]
    if not writes:
        return {}
    place = {node: position for position, node in enumerate(graph.nodes)}
    sharing: dict[int, list[torch.fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        found_here = [] if node.op == "output" or node in transformed else tensors(example_value(node))
        if not any(is_traceable_wrapper_subclass(tensor) for tensor in found_here):
            for storage in memory_of(node) if found_here else ():
                sharing[storage].append(node)
    found: dict[torch.fx.Node, str] = {}
    for node, targets in writes:
        for target in targets:
            peers = {peer for storage in memory_of(target) for peer in sharing.get(storage, ())}
            before = [peer for peer in peers if place[peer] < place[node]]
            outside = any(peer.op in ("placeholder", "get_attr") for peer in before)
            read_later = any(place[user] > place[node] for peer in before for user in peer.users)
            if outside or read_later or example_value(node) is None:
                found |= dict.fromkeys((*peers, node), "its memory is written in place while others may read it")
    return found


PRODUCTS = ops_with(Trait.READS_FP8)
FACTORS = {"beta": 1, "alpha": 1, "use_gelu": False, "out_dtype": None, "dtype": None, "out": None}
"""Arguments that change the product, each with the value that leaves the product unchanged."""


def read_matrix_products(graph: OpGraph, nodes: Mapping[str, torch.fx.Node], trained: Set[str]) -> dict[str, MatrixProduct]:
    """Return {name: product} for the matrix products that fp8 kernels could run. `trained` names the values that get gradients."""
    names = {node: name for name, node in nodes.items()}
    apart = transformed_nodes(next(iter(names)).graph) if names else set()
    found = dict[str, MatrixProduct]()
    for name, node in nodes.items():
        call = node.op in ("call_function", "call_method") and op_name(node.target) in PRODUCTS and node not in apart
        read = operands(node) if call and graph[name].carries_fp32 else None
        if read is None or any(each not in names for each in read):
            continue
        (x, w), made = (names[each] for each in read), example_value(node)
        versions = {operand.value: operand.write_version for operand in graph[name].operands if not operand.twice}
        matrix, rows = example_value(read[1]), example_value(read[0])
        if x == w or not {x, w} <= versions.keys() or not all(map(_is_plain, (matrix, rows, made))):
            continue
        transposed = transposes(node)
        inner, columns = (hint(matrix.shape[dim]) for dim in ((0, 1) if transposed else (1, 0)))
        many = graph[x].numel // max(inner, 1)
        found[name] = MatrixProduct(x, w, versions[x], versions[w], many, inner, columns, x in trained, w in trained, transposed)
    return found


def operands(node: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node] | None:
    """Return the operands (rows x, matrix w) of a product; None for a product that fp8 kernels do not compute.

    The kernels take x with two or more dims, w with two dims, and at most one summand, which has one dim. The result is None, too, if an
    argument such as `alpha` changes the product (FACTORS).
    """
    given = named_arguments(node)
    if any(given.get(name, plain) not in (plain, None) for name, plain in FACTORS.items()):
        return None
    *summand, x, w = list(given.values())[:3] if op_name(node.target) == "addmm" else list(given.values())[:2]
    shapes = [_dims(each) for each in (x, w, *summand)]
    if shapes[0] < 2 or shapes[1] != 2 or shapes[2:] not in ([], [1]):
        return None
    return x, w


def bias_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the node that makes the summand (bias) of a product; None if the product has no summand."""
    given = named_arguments(node)
    return next(iter(given.values())) if op_name(node.target) == "addmm" else given.get("bias")


def transposes(node: torch.fx.Node) -> bool:
    """True if the layout of w is transposed against that of `linear`: w is (k, n), for x · w. A `linear` has w of (n, k), for x · wᵀ."""
    return op_name(node.target) != "linear"


def _dims(node: object) -> int:
    value = example_value(node) if isinstance(node, torch.fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not is_traceable_wrapper_subclass(value)
