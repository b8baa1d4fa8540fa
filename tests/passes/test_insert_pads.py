"""Edits of small captured graphs: where sizes change, and what ops are told of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx
from pad_help import Attention, OddCNN, OddMLP, noise

from amprewrite.graphs.fx.ops.pad_ops import batch_norm_padded, pad_cast, resize
from amprewrite.ir.policies.policy import Policy, parse_pad
from amprewrite.passes.driver import read_problem, rewrite_graph
from amprewrite.tables.formats import BF16

Capture = Callable[..., torch.fx.GraphModule]


def edited(module: torch.fx.GraphModule, pad: object = "always") -> torch.fx.GraphModule:
    """Copies of weights are kept, so that their pads cost nothing."""
    return rewrite_graph(read_problem(module, Policy(BF16, keeps_copies=True), pad=parse_pad(pad, False)))[0]


def targets(module: torch.fx.GraphModule) -> list[object]:
    return [node.target for node in module.graph.nodes]


def test_weights_are_padded_by_their_casts_and_activations_at_the_edges(capture: Capture) -> None:
    module = edited(capture(OddMLP(), noise(8, 101)))
    assert targets(module).count(pad_cast) == 8 and targets(module).count(resize) == 2


def test_without_pads_the_graph_is_left_alone(capture: Capture) -> None:
    module = edited(capture(OddMLP(), noise(8, 101)), "never")
    assert not {pad_cast, resize} & set(targets(module))


def test_attention_is_told_the_scale_of_its_logical_head_size(capture: Capture) -> None:
    module = edited(capture(Attention(60, 4, True), noise(2, 6, 60)))
    (node,) = [n for n in module.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert node.kwargs["scale"] == pytest.approx(15**-0.5)
    assert node.meta["example_value"].shape[-1] == 16


def test_views_and_splits_are_told_physical_sizes(capture: Capture) -> None:
    module = edited(capture(Attention(60, 4, True), noise(2, 6, 60)))
    (split,) = [n for n in module.graph.nodes if n.target == "split"]
    views = [n.args[1:] for n in module.graph.nodes if n.target == "view"]
    assert split.args[1] == 64 and (2, 6, 4, 16) in views and (2, 6, 64) in views


def test_batch_norm_in_training_pads_its_statistics_itself(capture: Capture) -> None:
    module = edited(capture(OddCNN(norm=True), noise(2, 3, 16, 16)))
    assert targets(module).count(batch_norm_padded) == 2
