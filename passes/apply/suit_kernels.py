"""Change the norms, convolutions and recurrent layers that `plan-edits` names: low kernels of these are inexact or give wrong gradients.

1. A norm without weights gets a weight of fp32 ones, so that its kernel computes mean and variance in fp32.
2. A separate op in front of a convolution pads the convolution's input.
3. A recurrent layer runs in parts of some time steps, with low-precision copies of its weights for each part.

    before   batch_norm(x, None, None)
             conv2d(x, weight, bias, 2, 1)
             gru(x, h, weights, True, 1, 0.0, True, False, False)
    after    batch_norm(x, None, None, x.new_ones(x.size(1), dtype=torch.float32))
             conv2d(pad(x, (1, 1, 1, 1)), weight, bias, 2, 0)
             in_parts(gru)(x, h, weights, True, 1, 0.0, True, False, False)
"""

from __future__ import annotations

import torch
import torch.fx
import torch.nn.functional as F

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.graphs.fx.flow.kernel_pins import padding_of
from amprewrite.graphs.fx.node_facts import example_value, named_arguments, set_argument
from amprewrite.graphs.fx.run.recurrent_layers import in_parts
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.tables.vocabulary import Edit


class SuitKernels(Pass[RegionPlan, EditedGraph]):
    needs = ("edits",)

    def __call__(self, plan: RegionPlan, edited: EditedGraph) -> None:
        for name in plan.edited(Edit.FP32_STATISTICS):
            _give_ones(edited.nodes[name])
        for name in plan.edited(Edit.PAD_APART):
            _pad_apart(edited.nodes[name])
        for name in plan.edited(Edit.RUN_IN_PARTS):
            edited.nodes[name].target = in_parts(edited.nodes[name].target)  # type: ignore[arg-type]


def _give_ones(node: torch.fx.Node) -> None:
    """Pass fp32 ones, one for each channel, as the weight of a norm without weights. Its CPU kernel then computes statistics in fp32."""
    graph = node.graph
    values = node.args[0] if node.args else node.kwargs["input"]
    with graph.inserting_before(node):
        channels = graph.call_method("size", (values, 1))
        ones = graph.call_method("new_ones", (values, (channels,)), {"dtype": torch.float32})
    set_argument(node, 3, "weight", ones)


def _pad_apart(node: torch.fx.Node) -> None:
    """Move the padding of a convolution into a `pad` op before it: padding in the convolution would leave gradients uninitialised."""
    given = named_arguments(node)
    padding = padding_of(given, example_value(given["weight"]))
    with node.graph.inserting_before(node):
        padded = node.graph.call_function(F.pad, (given["input"], [side for sides in reversed(padding) for side in sides]))
    set_argument(node, 0, "input", padded)
    set_argument(node, 4, "padding", 0)
