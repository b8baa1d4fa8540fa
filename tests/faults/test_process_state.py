"""What stands before a rewrite, a call, training, an export or a command stands after it, in one thread and in eight."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from process_state import changes, process_state
from torch import nn

import amprewrite
from amprewrite.api import export_program
from amprewrite.api.cli.main import main
from amprewrite.runtime.ambient.kept_state import random_state_kept, state_kept
from amprewrite.runtime.compiler.dynamo import ONE_EXPORT


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.body(x), -1)


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def capture(folder: Path, name: str) -> None:
    amprewrite.rewrite(NETS[name], dtype="bf16", example_inputs=(X,))


def infer(folder: Path, name: str) -> None:
    amp = amprewrite.rewrite(NETS[name].eval(), dtype="fp16")
    with torch.no_grad():
        amp(X)


def train(folder: Path, name: str) -> None:
    amp = amprewrite.rewrite(NETS[name].eval(), dtype="bf16")  # without dropout: what training draws is its own
    optimizer = torch.optim.SGD(amp.parameters(), 0.1)
    for _ in range(3):
        amp(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def export(folder: Path, name: str) -> None:
    amprewrite.rewrite(NETS[name].eval(), dtype="bf16").export_program((X,))


def export_onnx(folder: Path, name: str) -> None:
    amprewrite.rewrite(NETS[name].eval(), dtype="fp16").export_onnx(folder / f"{name}.onnx", (X,))


def command(folder: Path, name: str) -> None:
    (folder / f"zoo_{name}.py").write_text(ZOO)
    assert main(["plan", f"{folder}/zoo_{name}.py:net", "--dtype", "bf16", "-o", f"{folder}/{name}.json"]) == 0


ZOO = """
import torch

def net():
    made = torch.nn.utils.skip_init(torch.nn.Linear, 4, 4)  # draws nothing
    torch.nn.init.ones_(made.weight), torch.nn.init.ones_(made.bias)
    return made, (torch.ones(2, 4),)
"""
ADVICE = logging.getLogger("torch.onnx._internal.exporter._registration")
NETS: dict[str, Net] = {}
WORK = {"capture": capture, "infer": infer, "train": train, "export": export, "export_onnx": export_onnx, "command": command}


def run(work: Callable[[Path, str], None], folder: Path, name: str) -> None:
    if "onnx" in work.__name__:
        pytest.importorskip("onnxscript")
    work(folder, name)


@pytest.fixture(autouse=True)
def nets():
    """Made before the state is taken: making a model draws its weights."""
    torch.manual_seed(0)
    NETS.update({f"n{number}": Net() for number in range(10)})
    yield
    NETS.clear()


@pytest.mark.parametrize("name", WORK)
@pytest.mark.long
def test_one_thread_leaves_the_process_as_it_was(name, tmp_path):
    run(WORK[name], tmp_path, "n8")  # what is imported on first use is there now
    gc.collect()  # what a rewritten model sets goes with it
    before = process_state()
    run(WORK[name], tmp_path, "n9")
    gc.collect()
    assert not changes(before, process_state())


@pytest.mark.parametrize("name", ["export", *(pytest.param(each, marks=pytest.mark.slow) for each in ("capture", "train", "export_onnx"))])
def test_eight_threads_leave_the_process_as_it_was(name, tmp_path):
    run(WORK[name], tmp_path, "n8")
    before = process_state()
    failed = together([lambda n=f"n{number}": run(WORK[name], tmp_path, n) for number in range(8)])
    assert not failed, failed
    assert not changes(before, process_state())


def test_captures_in_threads_leave_dynamo_s_settings_as_they_were():
    """Before torch 2.12 all threads share them: while one thread captures, no other may take changed settings for the user's."""
    changed = ("suppress_errors", "recompile_limit", "allow_empty_graphs", "use_numpy_random_stream", "record_runtime_overhead")
    before = {each: getattr(torch._dynamo.config, each) for each in changed}
    first, rest = threading.Event(), threading.Event()

    def slow(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        if not first.is_set():  # the first capture ends while others wait with settings of their own, or have not set any
            first.set()
            rest.wait(1)
        return graph

    def call(number: int) -> None:
        if number:
            first.wait()
        amprewrite.rewrite(nn.Linear(8, 8 + number), dtype="bf16", backend=slow)(X)

    failed = together([lambda number=number: call(number) for number in range(4)])
    assert not failed, failed
    assert {each: getattr(torch._dynamo.config, each) for each in changed} == before


def test_planning_an_export_annotates_no_graph_of_another_export(monkeypatch):
    """While a thread exports, functions that Dynamo skips annotate the one graph of the process: exports in eight threads failed."""
    planning, inside, planned = threading.Event(), threading.Event(), threading.Event()
    strays = []
    plan, annotate = export_program.rewrite_for, torch.fx.traceback.annotate

    def plans(*args, **kwargs):
        planning.set()
        inside.wait(0.5)  # the other export begins now, if it can
        try:
            return plan(*args, **kwargs)
        finally:
            planned.set()

    def annotates(noted):
        if not ONE_EXPORT._is_owned():
            strays.append(noted)
        return annotate(noted)

    class Waits(Net):
        def forward(self, x):
            inside.set()
            planned.wait(5)
            return super().forward(x)

    def another() -> None:
        planning.wait(60)
        export_program.capture(Waits().eval(), (X,))

    run(WORK["export"], Path(), "n8")  # imports what is imported on first use
    monkeypatch.setattr(export_program, "rewrite_for", plans)
    monkeypatch.setattr(torch.fx.traceback, "annotate", annotates)
    assert not together([lambda: run(WORK["export"], Path(), "n0"), another])
    assert not strays


@pytest.mark.slow
def test_threads_that_do_different_things_leave_the_process_as_it_was(tmp_path):
    names = ["capture", "infer", "train", "export_onnx", "export_onnx", "capture", "infer", "train"]
    for name in set(names):
        run(WORK[name], tmp_path, "n8")
    before = process_state()
    failed = together([lambda n=f"n{number}", name=name: run(WORK[name], tmp_path, n) for number, name in enumerate(names)])
    assert not failed, failed
    assert not changes(before, process_state())


def together(jobs: list[Callable[[], None]]) -> list[str]:
    """Run the jobs in threads that start at once; what failed."""
    failed: list[str] = []
    start = threading.Barrier(len(jobs))

    def one(job: Callable[[], None]) -> None:
        start.wait()
        try:
            job()
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=one, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def test_what_other_threads_print_and_log_during_an_export_arrives(tmp_path, caplog):
    pytest.importorskip("onnxscript")
    amp, done, out = amprewrite.rewrite(NETS["n0"].eval(), dtype="fp16"), threading.Event(), io.StringIO()
    printed = 0

    def prints() -> None:
        nonlocal printed
        while not done.wait(0.002):
            print("line")
            ADVICE.warning("record")
            printed += 1

    with contextlib.redirect_stdout(out):
        other = threading.Thread(target=prints)
        other.start()
        amp.export_onnx(tmp_path / "net.onnx", (X,), opset=18)
        done.set()
        other.join()
    assert out.getvalue() == "line\n" * printed and printed > 10
    assert [record.message for record in caplog.records if record.name == ADVICE.name] == ["record"] * printed


def test_the_exporter_of_other_tests_leaves_the_logger_as_it_was():
    """Else what the test above looks for is dropped wherever those ran before it."""
    export = pytest.importorskip("onnx_help").export
    level = ADVICE.level
    export(NETS["n0"], {"x": X})
    assert ADVICE.level == level


def test_overlapping_blocks_restore_the_random_state_before_the_first():
    before = torch.get_rng_state()
    first, second = random_state_kept(), random_state_kept()
    first.__enter__()
    torch.rand(3)
    second.__enter__()
    torch.rand(3)
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_buffer_with_nan_that_nothing_writes_is_not_written_to_put_it_back(dtype):
    model = nn.Module()
    model.register_buffer("scales", torch.tensor([1.0, torch.nan]).to(dtype))
    version = model.scales._version
    with state_kept(model, ()):
        pass
    assert model.scales._version == version
    with state_kept(model, ()):
        model.scales.copy_(torch.zeros(2))
    assert model.scales.to(torch.complex64).isnan().tolist() == [False, True]


def test_a_command_in_process_shows_warnings_as_before(tmp_path):
    shown = warnings.showwarning
    assert main(["lists", "softmax"]) == 0
    assert main(["plan", f"{tmp_path}/missing.py:net"]) == 2
    assert warnings.showwarning is shown and str(tmp_path) not in sys.path
