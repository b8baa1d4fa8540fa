"""How large the weights of a captured graph are: known without any data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import held_value


def magnitudes(captured: Captured, inputs: Sequence[Any]) -> dict[str, float]:
    """Largest magnitude of each fp32 parameter and buffer of the graph, by node; {} for a wide low format."""
    found = weights_among(captured, inputs)
    return dict(zip(found, largest(list(found.values())), strict=True))


def weights_among(captured: Captured, inputs: Sequence[Any]) -> dict[str, Tensor]:
    """The fp32 parameters and buffers that the graph takes among its `inputs` or reads from its module, by node.

    {} for a wide low format. Tensors of other classes (distributed, fake) are left out: looking at them is not free.
    """
    if not captured.problem.policy.low.narrow:
        return {}
    names, graph = captured.names, captured.module.graph
    placeholders = zip(graph.find_nodes(op="placeholder"), inputs, strict=False)
    held = ((node, held_value(node)) for node in graph.find_nodes(op="get_attr"))
    found: dict[str, Tensor] = {}
    for node, value in (*placeholders, *held):
        vertex = captured.problem.graph.nodes.get(names.get(node, ""))
        plain = type(value) in (Tensor, nn.Parameter) and value.dtype == torch.float32 and value.layout == torch.strided
        if plain and vertex is not None and vertex.role in ("parameter", "buffer") and value.device.type != "meta" and value.numel():
            found[vertex.name] = value
    return found


def largest(tensors: Sequence[Tensor]) -> list[float]:
    """Largest magnitude of each; one read by the host for each device."""
    if not tensors:
        return []
    with torch.no_grad():
        norms = torch._foreach_norm([tensor.detach() for tensor in tensors], ord=float("inf"))
    sizes = [0.0] * len(norms)
    for device in {norm.device for norm in norms}:
        places = [place for place, norm in enumerate(norms) if norm.device == device]
        for place, size in zip(places, torch.stack([norms[place] for place in places]).tolist(), strict=True):
            sizes[place] = size
    return sizes


__all__ = ["largest", "magnitudes", "weights_among"]
