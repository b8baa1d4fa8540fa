"""fx graph → calls: arguments and shapes of every op as plain data, and which ops write memory that others see.

By name it knows `getitem`, which may pick one of several results, and what takes small steps: `add`, `sub`, `mul`, `div`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from amprewrite.graphs.fx.node_facts import LEAVES, differentiable, example_value, memory_of, tensors, transformed_nodes, written
from amprewrite.ir.op_calls import Call, Ref, Shape, leaves
from amprewrite.ir.op_graph import OpGraph
from amprewrite.tables.formats import Format, is_far
from amprewrite.tables.ops.op_lists import Trait, op_name, ops_with


def read_calls(graph: OpGraph, fx_nodes: Mapping[str, torch.fx.Node]) -> dict[str, Call]:
    """A Call for every vertex of `graph`, by name, in the order in which the fx graph runs them."""
    names = {node: name for name, node in fx_nodes.items()}
    if not names:
        return {}
    module_graph = next(iter(names)).graph
    transformed = transformed_nodes(module_graph)
    opaque = _aliased_writes(module_graph, transformed)
    opaque |= dict.fromkeys(transformed, "it runs inside a torch.func transform")
    opaque |= dict.fromkeys((node for node in module_graph.nodes if LEAVES in node.meta), "others see this value itself, or its memory")
    return {
        names[node]: _call(graph, names[node], node, names, opaque.get(node, "")) for node in module_graph.nodes if node in names
    }


NORMS = ops_with(Trait.RUNNING_STATISTICS)
STATISTICS_AND_WEIGHTS = ((1, "running_mean"), (2, "running_var"), (3, "weight"), (4, "bias"))
"""Places and names of the arguments that both take."""


def read_bare_norms(nodes: Mapping[str, torch.fx.Node]) -> tuple[str, ...]:
    """Norms of values on a CPU without any argument beside them: nothing else says in what dtype they keep their statistics."""
    return tuple(name for name, node in nodes.items() if op_name(node.target) in NORMS and _is_bare(node))


def _is_bare(node: torch.fx.Node) -> bool:
    value = example_value(node)
    on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return on_cpu and all((node.args[at] if len(node.args) > at else node.kwargs.get(name)) is None for at, name in STATISTICS_AND_WEIGHTS)


def read_far_constants(nodes: Mapping[str, torch.fx.Node], low: Format) -> tuple[str, ...]:
    """Ops with finite constants beyond the range of `low` among their arguments."""
    arguments = {name: (node.args, tuple(node.kwargs.values())) for name, node in nodes.items()}
    return tuple(name for name, given in arguments.items() if any(is_far(leaf, low) for leaf in leaves(given)))


SMALL, MANY = 0.25, 8
"""A step is small if a number scales it down to that, and this many in a row are many. The sums of eight, each rounded, are off by three
times what one is; a step that is scaled to a quarter is off by a quarter of that. torch.autocast keeps such sums in fp32, as their first
value is."""


def read_small_steps(graph: OpGraph, nodes: Mapping[str, torch.fx.Node]) -> tuple[str, ...]:
    """Sums that go on with one value in many small steps, `x = x + 0.1 * f(x)`, where products are in each step."""
    names = {node: name for name, node in nodes.items()}
    if not names:
        return ()
    order = {node: place for place, node in enumerate(next(iter(names)).graph.nodes)}
    heavy = {node for name, node in nodes.items() if graph[name].flops}
    from_value = {node: value for node in order if node in names and (value := _stepped_from(node, order, heavy)) is not None}
    before = {node: _sum_behind(value, from_value) for node, value in from_value.items()}
    so_far: dict[torch.fx.Node, int] = {}
    for node, last in before.items():
        so_far[node] = 1 + (so_far[last] if last is not None else 0)
    whole = dict(so_far)
    for node, last in reversed(before.items()):
        if last is not None:
            whole[last] = max(whole[last], whole[node])
    return tuple(names[node] for node, steps in whole.items() if steps >= MANY)


def _stepped_from(node: torch.fx.Node, order: Mapping[torch.fx.Node, int], heavy: set[torch.fx.Node]) -> torch.fx.Node | None:
    """The value that a sum takes a small step from; None if it is no such sum."""
    op, given = op_name(node.target), node.args[:2]
    first, second = given if len(given) == 2 else (None, None)
    if op not in ("add", "sub") or not isinstance(first, torch.fx.Node) or not isinstance(second, torch.fx.Node):
        return None
    shrunk = isinstance(node.kwargs.get("alpha"), float) and abs(node.kwargs["alpha"]) <= SMALL  # type: ignore[operator, arg-type]
    for step, value in ((second, first), (first, second))[: 1 if op == "sub" or shrunk else 2]:
        small = (shrunk or _is_scaled_down(step)) and _shape_of(value) == _shape_of(node)
        if small and any(_leads_through(each, step, order, heavy) for each in _alike(value)):
            return value
    return None


def _alike(value: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """A value, and those that it is made of one by one: copies, views, activations."""
    yield value
    while value.op.startswith("call"):
        given = [each for each in value.all_input_nodes if isinstance(example_value(each), torch.Tensor)]
        if len(given) != 1:
            return
        (value,) = given
        yield value


def _is_scaled_down(node: torch.fx.Node) -> bool:
    """Whether a value is another times a small number."""
    op = op_name(node.target) if node.op.startswith("call") else ""
    numbers = [float(each) for each in node.args if isinstance(each, int | float)]
    if op == "mul":
        return any(abs(number) <= SMALL for number in numbers)
    return op == "div" and len(node.args) == 2 and isinstance(node.args[1], int | float) and abs(node.args[1]) * SMALL >= 1


def _leads_through(value: torch.fx.Node, step: torch.fx.Node, order: Mapping[torch.fx.Node, int], heavy: set[torch.fx.Node]) -> bool:
    """Whether `step` is made of `value`, and with a product."""
    seen, waiting = {step}, [step]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in seen and order[source] >= order[value]:
                seen.add(source)
                waiting.append(source)
    return value in seen and not heavy.isdisjoint(seen - {value})


def _sum_behind(value: torch.fx.Node, sums: Mapping[torch.fx.Node, torch.fx.Node]) -> torch.fx.Node | None:
    """The sum of small steps that a value is, or is made of by itself."""
    return next((each for each in _alike(value) if each in sums), None)


def _shape_of(node: torch.fx.Node) -> tuple[Any, ...] | None:
    value = example_value(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


_STOP = ops_with(Trait.STOPS_GRADIENT)
MOST_READERS = 8
"""So many gradients a low format may add up: each sum is rounded, which for eight is what one product's rounding is in bf16, 0.4 %."""


def read_by_many(graph: OpGraph, nodes: Mapping[str, torch.fx.Node]) -> tuple[str, ...]:
    """Values with gradients that more than MOST_READERS ops read: memories of encoders, biases shared by layers, matrices of loops.

    torch.autocast copies each for every reader, and adds the gradients of the copies up in fp32. Of weights it makes one copy, too.
    """
    names, found = {node: name for name, node in nodes.items()}, list[str]()
    trained: set[torch.fx.Node] = set()
    for node in next(iter(names)).graph.nodes if names else ():
        value = example_value(node)
        held = node.op in ("placeholder", "get_attr")
        learns = value.requires_grad if held and isinstance(value, torch.Tensor) else not trained.isdisjoint(node.all_input_nodes)
        if learns and op_name(node.target) not in _STOP and any(map(differentiable, tensors(value))):
            trained.add(node)
    for node in trained & names.keys():
        vertex = graph[names[node]]
        if vertex.carries_fp32 and vertex.role != "parameter" and sum(user in trained for user in node.users) > MOST_READERS:
            found.append(vertex.name)
    return tuple(sorted(found, key=graph.rank.__getitem__))


def _call(graph: OpGraph, name: str, node: torch.fx.Node, names: Mapping[torch.fx.Node, str], opaque: str) -> Call:
    vertex, value = graph[name], example_value(node)
    found = tensors(value)
    if any(is_traceable_wrapper_subclass(t) or t.layout != torch.strided for t in found):
        opaque = opaque or "its tensor is no plain strided one"
    of_tuple = vertex.op == "getitem" and node.args and not isinstance(example_value(node.args[0]), torch.Tensor)  # type: ignore[arg-type]
    return Call(
        name,
        vertex.op,
        tuple(_plain(a, names) for a in node.args),
        {key: _plain(a, names) for key, a in node.kwargs.items()},
        tuple(_shape(t) for t in found),
        not isinstance(value, torch.Tensor),
        bool(found) and all(t.is_floating_point() for t in found),
        node.args[1] if of_tuple and isinstance(node.args[1], int) else None,
        opaque,
        vertex.role,
    )


def _shape(tensor: torch.Tensor) -> Shape:
    return tuple(s if isinstance(s, int) else str(s) for s in tensor.shape)


def _plain(argument: Any, names: Mapping[torch.fx.Node, str]) -> Any:
    """An argument without fx nodes: a node becomes a Ref, but a number that capture knows becomes that number."""
    if isinstance(argument, torch.fx.Node):
        value = example_value(argument)
        return value if type(value) in (int, float, bool) else Ref(names.get(argument, argument.name))
    if isinstance(argument, slice):
        return slice(*(_plain(a, names) for a in (argument.start, argument.stop, argument.step)))
    if isinstance(argument, tuple | list):
        return tuple(_plain(a, names) for a in argument)
    if isinstance(argument, dict):
        return {key: _plain(a, names) for key, a in argument.items()}
    return argument


def _aliased_writes(graph: torch.fx.Graph, transformed: set[torch.fx.Node]) -> dict[torch.fx.Node, str]:
    """Nodes whose memory is written while another op still reads it.

    An in-place op on a value that is not read afterwards is no such case: it does what the same op out of place would.
    Nodes inside torch.func transforms have no memory to ask for.
    """
    place = {node: position for position, node in enumerate(graph.nodes)}
    sharing: dict[int, list[torch.fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        found_here = [] if node.op == "output" or node in transformed else tensors(example_value(node))
        if not any(is_traceable_wrapper_subclass(tensor) for tensor in found_here):
            for storage in memory_of(node) if found_here else ():
                sharing[storage].append(node)
    found: dict[torch.fx.Node, str] = {}
    for node in graph.nodes:
        for target in written(node) if node not in transformed else ():
            peers = {peer for storage in memory_of(target) for peer in sharing.get(storage, ())}
            before = [peer for peer in peers if place[peer] < place[node]]
            outside = any(peer.op in ("placeholder", "get_attr") for peer in before)
            read_later = any(place[user] > place[node] for peer in before for user in peer.users)
            if outside or read_later or example_value(node) is None:
                found |= dict.fromkeys((*peers, node), "its memory is written in place while others may read it")
    return found
