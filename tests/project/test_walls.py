"""Other people's cases: a sample of each wall with `make long`, the whole with `make slow`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WALL = ROOT / "examples" / "benchmarks" / "wall"


def rows(script: str, out: Path, *options: str, seconds: float = 300) -> list[dict[str, Any]]:
    """What a wall finds, one row a case."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, str(WALL / script), "--out", str(out), *options]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=seconds, env=settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in out.read_text().splitlines()]


def outcomes(found: list[dict[str, Any]]) -> Counter[str]:
    return Counter(row["outcome"] for row in found)


# -- ONNX ------------------------------------------------------------------------------------
COUNTED = {"right", "random", "refused"}
"""Outcomes of a float32 case that ONNX Runtime runs; a wrong result, another exception or a lost process is none of them."""
LEFT_OUT = {"no fp32", "fp32 fails"}
LIGHT = 9


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.long
def test_a_sample_of_onnxs_cases_converts(dtype: str, tmp_path: Path) -> None:
    """Among them a network, and what was refused once: past keys, empty inputs, sequences, slopes of old opsets."""
    pytest.importorskip("onnxruntime")
    words = "squeezenet,past_and_present_qk_matmul_bias,reduce_sum_empty_set,sequence_map_add_2,PReLU_2d,scan_sum,gemm,lstm,Conv1d,loop"
    found = rows("onnx_cases.py", tmp_path / "rows.jsonl", "--dtype", dtype, "--only", words)
    counts = outcomes(found)
    assert not set(counts) - COUNTED - LEFT_OUT and not counts["refused"], [row for row in found if row["outcome"] not in LEFT_OUT]
    assert counts["right"] > 30
    assert sum(row.get("low", 0) > 0 for row in found) > 15, "hardly anything runs low"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_all_of_onnxs_cases_convert_or_say_why_not(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    found = rows("onnx_cases.py", tmp_path / "rows.jsonl", "--dtype", dtype, seconds=3600)
    counts = outcomes(found)
    assert not set(counts) - COUNTED - LEFT_OUT, [row for row in found if row["outcome"] not in COUNTED | LEFT_OUT]
    assert counts["right"] >= 1180 and counts["refused"] <= 10
    assert sum(row["name"].startswith("real/") and row["outcome"] == "right" for row in found) == LIGHT


# -- real sizes ------------------------------------------------------------------------------
@pytest.mark.long
def test_nets_at_real_sizes_run_small(tmp_path: Path) -> None:
    """Their results depend on positions where they take any: else they would prove nothing about these."""
    pytest.importorskip("transformers")
    found = rows("real_size.py", tmp_path / "rows.jsonl", "--small", "--dtype", "bf16", seconds=600)
    assert set(outcomes(found)) == {"right"} and len(found) == 12, found
    assert all(row["positions"] is None or row["positions"] > 0.3 for row in found)
    assert {row["name"] for row in found if row["positions"] is not None} >= {"bert", "gpt2", "llama", "qwen", "mixtral"}


@pytest.mark.long
def test_a_long_wall_depends_on_positions_and_a_tiny_one_says_that_it_does_not(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    long = rows("models.py", tmp_path / "long.jsonl", "--only", "ministral,stablelm", "--length", "1024", "--dtype", "bf16", seconds=900)
    tiny = rows("models.py", tmp_path / "tiny.jsonl", "--only", "stablelm", "--dtype", "bf16")
    assert set(outcomes(long)) == {"right"} and all(row["positions"] > 0.3 for row in long), long
    assert all(row["positions"] < 0.05 for row in tiny), tiny


@pytest.mark.slow
def test_nets_at_real_sizes_are_as_exact_as_autocast(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = rows("real_size.py", tmp_path / "rows.jsonl", "--dtype", "bf16", "--seconds", "1800", seconds=6 * 3600)
    assert set(outcomes(found)) == {"right"} and len(found) == 12, found


# -- PyTorch's databases -----------------------------------------------------------------------
TWICE_ROUNDED = {"module/nn.Bilinear", "op/nn.functional.bilinear"}
"""Two products one after another, each rounded in low; torch.autocast runs the first one low only. Off by 1.5e-2 at most in bf16."""


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.long
def test_a_sample_of_pytorchs_databases_is_right(dtype: str, tmp_path: Path) -> None:
    """What was wrong once (inner, einsum, a derivative that is told a dtype), lazy modules, and what has its own rule."""
    words = "op/inner,op/einsum,op/_softmax_backward_data,module/nn.LazyConv1d,op/to_sparse,op/empty_like,op/cumsum,module/nn.GRUCell"
    found = rows("torch_ops.py", tmp_path / "rows.jsonl", "--dtype", dtype, "--samples", "2", "--only", words)
    assert set(outcomes(found)) == {"right"}, found
    assert len(found) >= 8 and sum(row["low"] for row in found) > 10


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_all_of_pytorchs_databases_raise_nothing_and_are_as_exact_as_autocast(dtype: str, tmp_path: Path) -> None:
    found = rows("torch_ops.py", tmp_path / "rows.jsonl", "--dtype", dtype, seconds=4 * 3600)
    bad = [row for row in found if row["outcome"] not in ("right", "no sample", "fp32 fails") and row["name"] not in TWICE_ROUNDED]
    assert not bad, bad
    assert outcomes(found)["right"] > 700


def work(name: str) -> dict[str, Any]:
    """A case of a wall that ends its process, one that takes for ever, one that raises, and one that is right."""
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "hangs":
        signal.pause()
    if name == "fails":
        raise ValueError("no such case")
    return {"outcome": "right", "by": os.getpid()}


def test_a_wall_goes_on_where_it_ended_and_outlives_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WALL))
    import children

    names, out = ["dies", "fails", "fine", "hangs"], tmp_path / "rows.jsonl"
    found = {row["name"]: row for row in children.run_cases(names, work, out, seconds=1.0)}
    assert {name: row["outcome"] for name, row in found.items()} == {"dies": "died", "fails": "broken", "fine": "right", "hangs": "late"}
    assert found["fails"]["why"] == "ValueError: no such case" and found["fine"]["by"] != os.getpid()
    lines = out.read_text().splitlines()
    out.write_text("\n".join([*lines[:3], lines[3][:10]]))  # as if the run had been ended while it wrote the last line
    again = list(children.run_cases(names, work, out, seconds=1.0))
    assert [row for row in again if row["name"] == "fine"] == [found["fine"]], "it is not run again"
    assert {row["name"]: row["outcome"] for row in again} == {name: row["outcome"] for name, row in found.items()}
    assert children.page("t", again, ("name", "outcome")).count("<tr class=") == 4
