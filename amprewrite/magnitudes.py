"""How large the weights of a captured graph are: known without any data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from amprewrite.program import Program

NARROW = 1e30
"""A format that ends below this has a range that matters: fp16 does, bf16 ends where fp32 does."""


def magnitudes(program: Program, inputs: Sequence[Any]) -> dict[str, float]:
    """Largest magnitude of each fp32 parameter and buffer among the graph's `inputs`, by node; {} for a wide low format.

    Tensors of other classes (distributed, fake) are left out: looking at them is not free.
    """
    if program.policy.low.max > NARROW or program.module is None:
        return {}
    by_node = {node: name for name, node in program.fx_nodes.items()}
    found: dict[str, torch.Tensor] = {}
    for node, value in zip(program.module.graph.find_nodes(op="placeholder"), inputs, strict=False):
        vertex = program.graph.nodes[by_node[node]]
        plain = type(value) in (torch.Tensor, nn.Parameter) and value.dtype == torch.float32 and value.layout == torch.strided
        if plain and vertex.role in ("parameter", "buffer") and value.device.type != "meta" and value.numel():
            found[vertex.name] = value.detach()
    if not found:
        return {}
    with torch.no_grad():
        norms = torch._foreach_norm(list(found.values()), ord=float("inf"))
        return {name: float(norm) for name, norm in zip(found, norms, strict=True)}
