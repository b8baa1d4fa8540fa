"""On a CPU, batch and instance norms that run low and have no weights get weights of one, in fp32.

That kernel keeps its mean and variance in the dtype of its other arguments, and where there are none in that of its input
(ATen/native/Normalization.cpp, `is_mixed_type`). CUDA's keeps them in fp32 always.
"""

from __future__ import annotations

import torch
import torch.fx
from torch.nn import functional as F

from amprewrite.graphs.fx.node_facts import example_value
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.program import Program
from amprewrite.tables.vocabulary import Colour

NORMS = (F.batch_norm, F.instance_norm)
STATISTICS_AND_WEIGHTS = ((1, "running_mean"), (2, "running_var"), (3, "weight"), (4, "bias"))
"""Places and names of the arguments that both take."""


class InsertOnes(Pass):
    name = "insert-ones"

    def call(self, program: Program) -> bool:
        low = {name for name, paint in program.paints.items() if paint.colour is Colour.LOW}
        found = [node for name, node in program.fx_nodes.items() if name in low and _is_bare(node)]
        for node in found:
            give_ones(node)
        return bool(found)


def _is_bare(node: torch.fx.Node) -> bool:
    """Whether `node` is a norm of values on a CPU, and nothing but these decides in what it keeps its statistics."""
    value = example_value(node)
    if node.target not in NORMS or not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return False
    return all((node.args[at] if len(node.args) > at else node.kwargs.get(name)) is None for at, name in STATISTICS_AND_WEIGHTS)


def give_ones(node: torch.fx.Node) -> None:
    """Let a norm without weights multiply by fp32 ones, one for each channel."""
    graph = node.graph
    values = node.args[0] if node.args else node.kwargs["input"]
    with graph.inserting_before(node):
        channels = graph.call_method("size", (values, 1))
        ones = graph.call_method("new_ones", (values, (channels,)), {"dtype": torch.float32})
    if len(node.args) > 3:
        node.update_arg(3, ones)
    else:
        node.update_kwarg("weight", ones)
