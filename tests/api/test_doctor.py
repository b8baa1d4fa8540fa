"""`amprewrite doctor` tells what a machine has, and fails if a small model computes something else than it should."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from amprewrite.api.cli import doctor
from amprewrite.api.cli.main import main
from amprewrite.tables.version import VERSION


def test_it_tells_versions_gains_kernels_and_checks(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["amprewrite"] == VERSION and found["versions"]["torch"]
    assert {(each["device"], each["format"]) for each in found["gains"]} >= {("cpu", "bf16"), ("cpu", "fp16")}
    assert all(each["speed"] > 0 and each["note"] for each in found["gains"])
    assert {each["what"] for each in found["checks"]} == {"results", "capture", "gradients", "overflow"}
    assert all(each["ok"] for each in found["checks"])


def test_a_failed_check_is_shown_and_is_status_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_ROOM", 0)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "FAILED  relative error" in said and "a failed one is a bug" in said


def test_a_machine_on_which_nothing_runs_gets_a_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    class Broken(nn.Module):
        def forward(self, x: object) -> object:
            raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(doctor, "_Small", Broken)
    assert main(["doctor"]) == 1
    assert "RuntimeError: no kernel image is available" in capsys.readouterr().out


def test_a_gpu_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--run-on", "cuda"]) == 2
    assert "--run-on cuda: doctor checks cpu here" in capsys.readouterr().err
