"""The source of an op in a plan: the line of the model's own code, whose file no name of a user's file is mistaken for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.graphs.fx.read.names import file_label
from amprewrite.runtime.ambient import low_cache

INPUT = torch.randn(4, 8)


@pytest.mark.parametrize("model", [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))])
def test_a_module_of_pytorch_names_no_line_of_this_library(model: nn.Module) -> None:
    amp = amprewrite.rewrite(model, dtype="bf16", example_inputs=(INPUT,))
    assert [node.op for node in amp.plan.nodes if node.op == "linear"]
    assert not [node.source for node in amp.plan.nodes if node.source]


def test_a_file_of_this_package_is_told_from_a_file_of_its_name() -> None:
    assert file_label(low_cache.__file__) == "amprewrite/runtime/ambient/low_cache.py"
    assert file_label("/home/user/amprewrite_models/low_cache.py") == "low_cache.py"


def test_a_model_in_a_file_named_as_ours_does_not_keep_the_cache_in_fp32(tmp_path: Path) -> None:
    """Its denied op is no conversion of a low cache that reads keys in fp32."""
    path = tmp_path / "low_cache.py"
    path.write_text("import torch\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return torch.logsumexp(x, -1)\n")
    spec = importlib.util.spec_from_file_location("low_cache", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    amp = amprewrite.rewrite(module.Model(), dtype="bf16", example_inputs=(INPUT,))
    (region,) = amp.plan.regions
    assert [node.source for node in region.nodes if node.op == "logsumexp"] == ["low_cache.py:5"]
    assert not low_cache.reads_high(region)


class Layer(nn.Module):
    """Calls itself as layers of transformers do, by a `__call__` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return super().__call__(*args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.norm(x))


class WithState(Layer):
    """Copies itself in a way of its own, so that its calls run a bound method."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


@pytest.mark.parametrize("made", [Layer, WithState])
def test_a_module_in_a_class_with_its_own_call_has_its_path_in_the_model(made: type[Layer]) -> None:
    """Its override was ignored in silence, as the plan named it by a path through a closure."""
    model = nn.Sequential(made(), nn.Sequential(made()))
    plan = amprewrite.plan(model, (torch.randn(2, 8),), dtype="bf16", overrides={"module:1.0.up": "high"})
    paths = {"0", "0.norm", "0.up", "1.0", "1.0.norm", "1.0.up"}
    assert {node.module for node in plan.nodes if node.role == "op"} == paths
    assert {node.module: node.colour.value for node in plan.nodes if node.op == "linear"} == {"0.up": "low", "1.0.up": "high"}
