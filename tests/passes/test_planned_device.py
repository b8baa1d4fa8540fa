"""Options device, measure and high; the device table; measured prices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import amprewrite
from amprewrite import AmpRewriteWarning, PolicyError
from amprewrite.graphs.fx.run import measure as measuring
from amprewrite.tables import devices
from amprewrite.tables.devices import DEVICES, H100, NAMED, fp32_rate, named_device

X = torch.randn(16, 32)


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).eval()


@pytest.fixture(autouse=True)
def no_reset_left_over() -> None:
    torch._dynamo.reset()


def planned(model: nn.Module, **options: object) -> amprewrite.CastPlan:
    with torch.no_grad():
        return amprewrite.plan(model, (X,), **options)


def test_a_named_device_sets_prices_and_format(model: nn.Module) -> None:
    plan = planned(model, device="V100")
    assert (plan.low, plan.regions[0].priced_on) == ("fp16", "v100 (modelled)")
    assert planned(model, device="h100").low == "bf16"


def test_an_unknown_device_lists_the_known_ones(model: nn.Module) -> None:
    with pytest.raises(PolicyError, match=r"device='h10'.*cpu, cpu-bf16, v100, t4, a100, l4, h100, h200, b200. Did you mean 'h100'"):
        amprewrite.rewrite(model, device="h10")


@pytest.mark.parametrize(
    "options, text",
    [
        ({"device": 3}, "device=3 is no device"),
        ({"device": "h100", "measure": True}, "choose one"),
        ({"measure": "yes"}, "True or False"),
        ({"high": "tf32"}, "one TF32 switch for the whole process"),
        ({"high": "bf16"}, "is not understood"),
    ],
)
def test_bad_options_say_so(model: nn.Module, options: dict[str, object], text: str) -> None:
    with pytest.raises(PolicyError, match=text):
        amprewrite.rewrite(model, **options)


def test_measured_prices_are_kept_and_said(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = planned(model, dtype="bf16", measure=True)
    assert plan.regions[0].priced_on.endswith("(measured)")
    assert any(note.startswith("prices measured here: 8 calls of ops") for note in plan.regions[0].notes)
    kept = measuring.cache_file().read_text()
    monkeypatch.setattr(measuring, "_seconds", lambda *_: pytest.fail("measured twice"))
    torch._dynamo.reset()
    again = planned(model, dtype="bf16", measure=True)
    assert again.regions[0].candidates == plan.regions[0].candidates
    assert measuring.cache_file().read_text() == kept


def test_a_damaged_cache_is_measured_anew(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measuring.cache_file().parent.mkdir()
    measuring.cache_file().write_text("{")
    with pytest.warns(AmpRewriteWarning, match=r"timings\.json is damaged"):
        assert planned(model, dtype="bf16", measure=True).regions[0].priced_on.endswith("(measured)")
    assert json.loads(measuring.cache_file().read_text())


def test_what_cannot_be_called_alone_has_no_measurement() -> None:
    def refuses() -> None:
        raise RuntimeError("no such kernel")

    assert measuring._seconds(lambda: refuses) is None
    assert measuring._seconds(lambda: lambda: None) > 0


@pytest.mark.parametrize("row", DEVICES, ids=lambda row: row.name)
def test_rows_of_the_table_make_sense(row: devices.Device) -> None:
    assert 1e10 <= row.bandwidth <= 1e13
    assert 1e-6 <= row.launch <= 1e-5
    assert all(row.rate(fmt) > row.rate("fp32") for fmt in row.low_formats)
    assert row.rate("tf32") >= row.rate("fp32") or row.type == "cpu"


def test_names_are_found_in_any_case() -> None:
    assert named_device("H100") is NAMED["h100"] is H100


def test_fp32_is_priced_by_torchs_switches() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        found = []
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            found.append((fp32_rate(H100, convolution=False), fp32_rate(devices.CPU, convolution=False)))
        assert found == [("fp32", "fp32"), ("tf32", "fp32")]
    finally:
        torch.set_float32_matmul_precision(before)
