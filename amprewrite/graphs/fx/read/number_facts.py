"""Read magnitudes, offsets (large means) and scaling factors of the weights of a captured graph. No sample data is needed.

`read_counts` finds the products that multiply counts, such as positions and lengths (`ir/evidence/counts.py`). It ignores indices, which it
recognises by their parameter names. `x[i] = y` (`setitem`) has special code, because its parameters have no names.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import (
    arguments,
    example_value,
    held_values,
    is_held,
    is_opaque,
    memory_of,
    tensors,
    value_dtype,
    written,
)
from amprewrite.graphs.fx.uncaptured import unselected
from amprewrite.ir.evidence.counts import EXACT, FILLS, HOLDS, UNIFORM, Count, keep_counts, made_of, written_over
from amprewrite.ir.evidence.range_rules import ADDS_UP, BLOCKS, added_values, has_offset, rows_have_offset, tables
from amprewrite.ir.op_graph import OpGraph
from amprewrite.tables.ops.op_lists import Trait, op_name, ops_with
from amprewrite.tables.vocabulary import OpKind
from amprewrite.torch_internals.dispatch import FakeTensor
from amprewrite.torch_internals.kernels import norms_of_tensors
from amprewrite.torch_internals.operators import HigherOrderOperator
from amprewrite.torch_internals.trees import tree_leaves

_PLACES = ("index", "indices", "out", "pad", "size", "output_size")
"""Names of arguments whose numbers do not enter an op's result: indices, sizes, and the tensor `out` that gets the result."""
_NORMS = ops_with(Trait.TAKES_MEAN_AWAY) | {"rms_norm"}


def magnitudes(captured: Captured, inputs: Sequence[Any]) -> dict[str, float]:
    """Return {name: largest finite magnitude} of all fp32 parameters and buffers; {} if the low format has fp32's range."""
    found = weights_among(captured, inputs)
    return dict(zip(found, largest(list(found.values())), strict=True))


def weights_among(captured: Captured, inputs: Sequence[Any]) -> dict[str, Tensor]:
    """Return {name: tensor} of the fp32 parameters and buffers that the graph takes in `inputs` or reads from its module.

    Names are those in the op graph. {} if the low format has fp32's range. Tensors of other classes (distributed, fake) are left out: their
    values are costly to read, or missing.
    """
    return _plain_weights(captured, inputs) if captured.problem.policy.low.narrow else {}


def _plain_weights(captured: Captured, inputs: Sequence[Any]) -> dict[str, Tensor]:
    """Return {name in the op graph: tensor} of the fp32 parameters and buffers. Distributed, fake and empty tensors are left out."""
    names, graph = captured.names, captured.module.graph
    found: dict[str, Tensor] = {}
    for node, value in held_values(graph, inputs):
        vertex = captured.problem.graph.nodes.get(names.get(node, ""))
        plain = type(value) in (Tensor, nn.Parameter) and value.dtype == torch.float32 and value.layout == torch.strided
        if plain and vertex is not None and vertex.role in ("parameter", "buffer") and value.device.type != "meta" and value.numel():
            found[vertex.name] = value
    return found


def offsets(captured: Captured, inputs: Sequence[Any]) -> frozenset[str]:
    """Return the names of the weights whose values have an offset: a mean that is larger than their spread (`has_offset`).

    The check covers parameters and buffers that ops add to a value, and tables in which ops look up rows. For a table, an offset that all
    rows have in common counts, too. The host waits once for each device.

    A weight that is added before a norm is checked like any other: training gives it no offset, because the norm removes offsets. A buffer
    that is only added to attention scores is returned, too, if the low format would round it: then it holds positions, and is no mask.
    """
    found, looked_up = added_values(captured.problem.graph), tables(captured.problem.graph)
    weights = _plain_weights(captured, inputs).items()
    added = {name: weight.detach() for name, weight in weights if name in found and weight.numel() > 1}
    rows = {name: weight.detach() for name, weight in weights if name in looked_up and weight.dim() > 1}
    with torch.no_grad(), unselected():
        flags = [has_offset(weight, found[name]) | _rounds_scores(captured, name, weight, found) for name, weight in added.items()]
        flags += [rows_have_offset(weight) for weight in rows.values()]
        flags = on_host(flags)
    return frozenset(name for name, offset in zip((*added, *rows), flags, strict=True) if offset)


def _rounds_scores(captured: Captured, name: str, weight: Tensor, scores: Mapping[str, bool]) -> Any:
    """Return whether `weight` is a buffer that is only added to attention scores, and the low format would round its numbers.

    The result is False or a 0-dim boolean tensor. `scores[name]` is True for a weight that is only added to scores. Numbers below -BLOCKS
    count as -BLOCKS, because a softmax returns about zero for all of them.
    """
    if not scores[name] or captured.problem.graph[name].role != "buffer":
        return False
    shown = weight.clip(-BLOCKS)
    return (shown.to(captured.problem.policy.low.dtype) != shown).any()


def factors(captured: Captured, inputs: Sequence[Any]) -> dict[str, float]:
    """Return {name: root mean square, with the sign of the mean} of each parameter that may scale a value, as LayerScale does.

    Such a parameter varies along one dim at most. At least one op that reads it may multiply by it. This excludes norms, sums of tensors
    and ops of the allow list, such as matrix products. The host waits once for each device and statistic.
    """
    graph = captured.problem.graph
    found = {name: weight.detach() for name, weight in _plain_weights(captured, inputs).items() if _may_scale(graph, name, weight)}
    if not found:
        return {}
    with torch.no_grad(), unselected():
        squares = on_host(norms_of_tensors(list(found.values())))
        signs = on_host([weight.mean() for weight in found.values()])
    return {
        name: math.copysign(square / math.sqrt(weight.numel()), sign)
        for (name, weight), square, sign in zip(found.items(), squares, signs, strict=True)
    }


def _may_scale(graph: OpGraph, name: str, weight: Tensor) -> bool:
    """True if `weight` is a parameter that varies along at most one dim and has a reader that may scale a value by it (see `factors`)."""
    if graph[name].role != "parameter" or sum(size > 1 for size in weight.shape) > 1:
        return False
    readers = list(graph.readers(name))
    other = (each for each in readers if each.kind is not OpKind.ALLOW and each.op not in _NORMS)
    return any(each.op not in ADDS_UP or len(each.operands) == 1 for each in other)


def largest(tensors: Sequence[Tensor]) -> list[float]:
    """Return the largest finite magnitude of each tensor. The host waits once for each device, and once more for a tensor with infinities.

    Infinities do not count, because every low format of narrow range can hold them: a mask of -inf fits.
    """
    if not tensors:
        return []
    with torch.no_grad(), unselected():
        found: list[float] = on_host(norms_of_tensors([tensor.detach() for tensor in tensors], ord=float("inf")))
        for place, tensor in enumerate(tensors):
            if not math.isfinite(found[place]):
                found[place] = float(torch.where(tensor.isfinite(), tensor.detach(), 0).abs().max())
    return found


def on_host(numbers: Sequence[Tensor]) -> list[Any]:
    """Return tensors of one shape as Python numbers, or lists of them. The host waits once for each device."""
    found: list[Any] = [None] * len(numbers)
    for device in {number.device for number in numbers}:
        places = [place for place, number in enumerate(numbers) if number.device == device]
        for place, number in zip(places, torch.stack([numbers[place] for place in places]).tolist(), strict=True):
            found[place] = number
    return found


Counts = Mapping[torch.fx.Node, Count]
"""By node: the `Count` of its value, which says whether the value is made of whole numbers, and how large it may be."""


def read_counts(captured: Captured, inputs: Sequence[Any], handed: Sequence[Count | None]) -> None:
    """Mark the matrix products of a captured graph that must stay fp32, because a low format would round whole numbers that they multiply.

    Such numbers are positions, for example (`ir/evidence/counts.py`). A marked product has `counted` set in the op graph. Also set
    `captured.counts`, the `Count` of every value. A graph without FLOPs (matrix products and the like) and without body graphs is left
    unchanged. `inputs` are the real inputs. For a body graph, `handed` has the `Count` of each input (see `find_counts`).
    """
    graph = captured.module.graph
    if any(node.flops for node in captured.problem.graph) or any(map(is_opaque, graph.nodes)):
        captured.counts = find_counts(graph, inputs, handed, lambda counts: any(node.counted for node in _kept(captured, counts)))
        captured.know(graph=_kept(captured, captured.counts))


def find_counts(graph: torch.fx.Graph, inputs: Sequence[Any], handed: Sequence[Count | None], matters: Callable[[Counts], Any]) -> Counts:
    """Return the `Count` of every value of a graph: whether it is made of whole numbers, and how large they may be.

    `inputs` are the real inputs of the graph; () if they are not available. For a body graph, `handed` has the `Count` of each input, or
    None for an input that the outer graph does not know. For any other graph, `handed` is (). To read constants, the host must wait for
    each device. So a first result treats all constants as large whole numbers. If `matters(first result)` is false, the first result is
    returned. Otherwise the constants are read, and a second result is returned.
    """
    held = _held(graph, inputs)
    around = {node: count for node, count in zip(graph.find_nodes(op="placeholder"), handed, strict=False) if count is not None}
    supposed = _propagate(graph.nodes, {**dict.fromkeys(held, Count.LARGE), **around})
    return _propagate(graph.nodes, {**_look(held), **around}) if matters(supposed) else supposed


def _kept(captured: Captured, counts: Counts) -> Any:
    """Return the op graph with `counted` set on every matrix product that must stay fp32 because it multiplies whole numbers."""
    by_name = {name: counts[node] for name, node in captured.nodes.items() if node in counts}
    # The number of terms that a product sums for each element is half the FLOPs of the element, because a multiply-add is two FLOPs.
    return keep_counts(captured.problem.graph, by_name, lambda node: node.flops // (2 * max(node.numel, 1)))


def _held(graph: torch.fx.Graph, inputs: Sequence[Any]) -> dict[torch.fx.Node, Any]:
    """Return {node: value or None if unknown} for floating-point buffers and constants of the model. Trained parameters are left out."""
    found = {}
    for node, value in held_values(graph, [*inputs, *[None] * len(graph.nodes)]):
        example = example_value(node)
        example = value if example is None else example
        if is_held(node) and isinstance(example, Tensor) and example.is_floating_point() and not _learns(example, value):
            found[node] = value
    return found


def _learns(*values: Any) -> bool:
    return any(isinstance(each, torch.nn.Parameter) or (isinstance(each, Tensor) and each.requires_grad) for each in values)


def _look(held: Mapping[torch.fx.Node, Any]) -> dict[torch.fx.Node, Count]:
    """Read the constants in `held`, {node: value}. Return the `Count` of each: whether it holds only whole numbers, and how large they are.

    LARGE: all are whole numbers, and one exceeds 256 (EXACT), so that a low format may round it. WHOLE: all are whole numbers up to 256.
    SMALL: some have fractions, or the values are unknown.
    """
    asked = dict[torch.fx.Node, Tensor]()
    with torch.no_grad(), unselected():
        for node, value in held.items():
            plain = type(value) in (Tensor, torch.nn.Buffer) and not isinstance(value, FakeTensor) and value.layout == torch.strided
            if plain and value.device.type != "meta" and value.numel():
                wide = value if value.dtype.itemsize > 1 else value.float()  # PyTorch cannot round fp8 values, so convert them to fp32
                asked[node] = torch.stack([(wide == wide.round()).all(), wide.abs().amax() > EXACT])
        kinds = [(Count.LARGE if beyond else Count.WHOLE) if whole else Count.SMALL for whole, beyond in on_host(list(asked.values()))]
    return dict.fromkeys(held, Count.SMALL) | dict(zip(asked, kinds, strict=True))


def _propagate(nodes: Any, known: Counts) -> dict[torch.fx.Node, Count]:
    """Return the `Count` of every value of a graph, from the `Count` of each input and constant (`known`).

    Writes in place may change the `Count` of a value. Then the result has the largest `Count` that the value has when an op reads it.
    """
    found, seen = dict[torch.fx.Node, Count](), dict[torch.fx.Node, Count]()
    writes = {node: targets for node in nodes if (targets := written(node))}
    sharing = defaultdict[int, list[torch.fx.Node]](list)
    """{storage: the nodes so far whose values lie in it}. It is filled only if the graph writes to memory."""
    for node in nodes:
        value, targets = example_value(node), writes.get(node, ())
        value = example_value(targets[0]) if value is None and targets else value  # setitem returns None: take the tensor that it writes
        read: Sequence[torch.fx.Node] = node.all_input_nodes
        if node in known:
            found[node] = known[node]
        elif node.op in ("call_function", "call_method") and not isinstance(node.target, HigherOrderOperator):
            op = op_name(node.target)
            read, numbers = _read_into_result(node, op)
            found[node] = made_of(op, _dtype(value), [found[each] for each in read], numbers)
        else:
            floating = any(each.is_floating_point() or each.is_complex() for each in tensors(value))
            found[node] = Count.NOT if floating or node.op == "output" else made_of("", _dtype(value), (), ())
        if writes:
            seen |= {each: max(found[each], seen.get(each, Count.NOT)) for each in read}
        held = {each for target in targets for storage in memory_of(target) for each in sharing[storage]}
        found |= {each: written_over(found[each], found[node]) for each in held}
        for storage in memory_of(node) if writes else ():
            sharing[storage].append(node)
    return found | seen


def _read_into_result(node: torch.fx.Node, op: str) -> tuple[list[torch.fx.Node], list[float]]:
    """Return (nodes, numbers) that make up the result: only y for `x[i] = y` and `x.new_tensor(y)`, only the fill value for `full`."""
    if op == "setitem" or op in UNIFORM & FILLS:
        given: Sequence[Any] = node.args[2:] if op == "setitem" else [node.kwargs.get("fill_value", node.args[-1:])]
        read = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.fx.Node)]
    else:
        new = str(getattr(node.target, "__name__", node.target)).startswith("new_")
        given = (*node.args[new:], *node.kwargs.values())
        read = [each for parameter, each in arguments(node)[new:] if parameter not in _PLACES]
    numbers = given if op not in HOLDS | UNIFORM else tree_leaves(given)  # lists of other ops hold sizes: take no numbers from them
    return read, [each for each in numbers if type(each) in (int, float)]


def _dtype(value: Any) -> str:
    """Return the name of the dtype of `value`. A Python float counts as fp32."""
    return "fp32" if isinstance(value, float | torch.SymFloat) else value_dtype(value)
