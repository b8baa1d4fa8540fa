"""A training step takes no more memory than under torch.autocast: bytes of live storages, counted exactly."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers", reason="needs the transformers package for its models")
SCALE = 128
"""Bytes that the state of a loss scale takes at most."""
FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("memory")


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_peak_of_a_step_is_below_autocasts(memory: ModuleType, name: str, dtype: str) -> None:
    torch.manual_seed(0)
    model, feed = memory.EVERY[name].make(False, 4)
    ours, theirs = (memory.peak(model.train(), feed, way, dtype) for way in ("ours", "autocast"))
    assert ours.kept < SCALE, "the state of the loss scale alone stays between steps"
    assert ours.step <= theirs.step + SCALE and ours.backward <= theirs.backward + SCALE


def test_storages_are_counted_once_and_until_they_are_gone(memory: ModuleType) -> None:
    with memory.Live() as live:
        x = torch.empty(100)
        view = x[10:]
        assert live.bytes == 400
        y = x + 1
        del x
        assert live.bytes == 800, "a view keeps all of it"
        del view, y
        assert live.bytes == 0 and live.peak == 800
