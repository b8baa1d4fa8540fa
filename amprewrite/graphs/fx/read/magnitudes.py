"""Read magnitudes, offsets and scaling factors of the weights of a captured graph. No sample data is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import held_values
from amprewrite.graphs.fx.uncaptured import unselected
from amprewrite.ir.evidence.range_rules import ADDS_UP, added_values, has_offset, rows_have_offset, tables
from amprewrite.ir.op_graph import OpGraph
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import OpKind
from amprewrite.torch_internals.kernels import norms_of_tensors

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
    """Return the fp32 parameters and buffers as `weights_among` does, but for a low format of any range."""
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

    The check covers parameters and buffers that are added to a value, and tables in which rows are looked up. For a table, an offset that
    all rows have in common counts, too. The host waits once for each device.

    Weights before a norm are checked like all others. Training gives them no offset, because the norm removes an offset and its gradient.
    """
    found, looked_up = added_values(captured.problem.graph), tables(captured.problem.graph)
    weights = _plain_weights(captured, inputs).items()
    added = {name: weight.detach() for name, weight in weights if name in found and weight.numel() > 1}
    rows = {name: weight.detach() for name, weight in weights if name in looked_up and weight.dim() > 1}
    with torch.no_grad(), unselected():
        flags = [has_offset(weight, found[name]) for name, weight in added.items()]
        flags += [rows_have_offset(weight) for weight in rows.values()]
        flags = on_host(flags)
    return frozenset(name for name, offset in zip((*added, *rows), flags, strict=True) if offset)


def factors(captured: Captured, inputs: Sequence[Any]) -> dict[str, float]:
    """Return {name: signed root mean square} of each parameter that may scale a value. The sign is the sign of its mean.

    Such a parameter varies along one dim at most, as a factor for each channel does. It has a reader other than products, norms and sums of
    several operands. The host waits once for each device and statistic.
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
    """True if the weight is a parameter of one dim at most, with a reader other than products, norms and sums of several operands."""
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
