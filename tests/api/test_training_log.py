"""The training log: one line a step, with what the loss scale reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.api.training_log import TrainingLog
from amprewrite.tables.errors import EmitError, PolicyError


class Writer:
    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.seen.append((tag, scalar_value, global_step))


def test_steps_and_skips_are_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = amprewrite.rewrite(nn.Linear(8, 1), dtype="fp16", loss_scale="torch")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.attach(optimizer)
    path, writer = tmp_path / "train.jsonl", Writer()
    with TrainingLog(model, path, writer=writer) as log:
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).sum() * (1e6 if step == 1 else 1e-3)
            loss.backward()
            optimizer.step()
            log.step(loss=loss.item())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["skipped"] for line in lines] == [0, 1, 1]
    assert lines[2]["scale"] == lines[0]["scale"] / 2 and "the gradient of bias" in lines[1]["overflow_in"]
    assert ("loss_scale/skipped", 1.0, 2) in writer.seen and len(writer.seen) == 9


def test_every_thins_the_log_out(tmp_path: Path) -> None:
    with TrainingLog(amprewrite.rewrite(nn.Linear(2, 2), dtype="fp16"), tmp_path / "log.jsonl", every=3) as log:
        assert [bool(log.step()) for _ in range(6)] == [False, False, True, False, False, True]


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs a device that is always full")
def test_a_full_disk_is_said() -> None:
    log = TrainingLog(amprewrite.rewrite(nn.Linear(2, 2), dtype="fp16"), "/dev/full")
    with pytest.raises(EmitError, match="/dev/full cannot be written"):
        log.step()
    log.close()


def test_bad_input(tmp_path: Path) -> None:
    amp = amprewrite.rewrite(nn.Linear(2, 2), dtype="fp16")
    with pytest.raises(PolicyError, match="takes a rewritten model"):
        TrainingLog(nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(PolicyError, match="nothing to write to"):
        TrainingLog(amp)
    with pytest.raises(PolicyError, match="counts steps"):
        TrainingLog(amp, tmp_path / "a", every=0)
    with pytest.raises(EmitError, match="cannot be written"):
        TrainingLog(amp, tmp_path / "gone" / "a")
