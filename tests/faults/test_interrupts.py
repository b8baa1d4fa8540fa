"""Interrupts, forks, spawns and ranks that die: what comes after them is right, or an error comes soon."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import amprewrite

ROOT = Path(__file__).resolve().parent.parent.parent
X = torch.linspace(-1, 1, 32).reshape(4, 8)

INTERRUPTED = """
import _thread, random, signal, sys, threading, time
import torch
from torch import nn
import amprewrite

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us without
torch.manual_seed(0)
choose, x, hit = random.Random(int(sys.argv[1])), torch.linspace(-1, 1, 32).reshape(4, 8), 0

def net():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

def train(amp, optimizer):
    amp(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

started = time.perf_counter()
first = amprewrite.rewrite(net(), dtype="fp16")
train(first, torch.optim.SGD(first.parameters(), 0.1))  # what is imported on first use is there now
taken = 0.5
for attempt in range(int(sys.argv[2])):
    model = net()
    amp = amprewrite.rewrite(model, dtype="fp16", loss_scale=256.0)
    optimizer = torch.optim.SGD(amp.parameters(), 0.1)
    timer = threading.Timer(choose.random() * taken, _thread.interrupt_main)  # SIGINT to this process's main thread
    began = time.perf_counter()
    try:
        timer.start()
        for _ in range(3):
            train(amp, optimizer)
        taken = time.perf_counter() - began
        timer.cancel()
        timer.join()
        time.sleep(0)
    except KeyboardInterrupt:
        hit += 1
    try:
        timer.join()
    except KeyboardInterrupt:
        pass
    optimizer.zero_grad()
    got = amp(x)
    got.square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    want = model(x)
    want.square().mean().backward()
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    for low, parameter in zip(grads, model.parameters()):
        torch.testing.assert_close(low, parameter.grad, rtol=2e-2, atol=2e-3)
    assert not torch.equal(got, want), "it ran low"
print(hit)
"""

PLAIN = """
import signal, sys
import torch

def interrupted(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "find_torch_dispatch_rule":  # torch's dispatcher, C++, calls it
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)

compiled, x = torch.compile(torch.nn.Linear(8, 8), backend="eager"), torch.ones(4, 8)
sys.setprofile(interrupted)
try:
    compiled(x)
except KeyboardInterrupt:
    print("KeyboardInterrupt")
"""
"""Plain torch.compile, interrupted where its C++ code has called Python."""
TORCH_ENDS = re.compile(r"terminate called after throwing an instance of 'pybind11::error_already_set'\s+what\(\):\s+KeyboardInterrupt")


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`code` run in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def ended_by_torch(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == -signal.SIGABRT and TORCH_ENDS.search(done.stderr) is not None


@pytest.mark.slow
def test_an_interrupt_may_end_a_process_under_plain_torch_compile_too():
    """If this fails, torch has been repaired: then README need not say so, and the test below need not put up with it."""
    done = python(PLAIN)
    assert ended_by_torch(done), (done.returncode, done.stdout, done.stderr[-2000:])


@pytest.mark.parametrize("seed, attempts", [(0, 8), *(pytest.param(seed, 60, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_call_after_an_interrupt_is_right(seed, attempts):
    done = python(INTERRUPTED, str(seed), str(attempts))
    if ended_by_torch(done) and any(ended_by_torch(python(PLAIN)) for _ in range(5)):  # where an interrupt hits is left to chance
        pytest.xfail("torch calls Python where its C++ code lets no exception pass: an interrupt there ends any process that compiles")
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= attempts // 8  # chosen moments may lie behind the end


def test_sigint_ends_a_command_with_130(tmp_path):
    (tmp_path / "zoo.py").write_text(textwrap.dedent("""
        import time
        import torch

        def net():
            print("ready", flush=True)
            time.sleep(60)
            return torch.nn.Linear(4, 4), (torch.ones(2, 4),)
    """))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell may have started us without
    start = f"{heard}; from amprewrite.api.cli.main import run; run()"
    command = [sys.executable, "-c", start, "plan", "zoo.py:net", "-o", "plan.json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130 and "Traceback" not in said
    assert not (tmp_path / "plan.json").exists()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def _call(amp: nn.Module, rows: int, results) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not come along in a fork
    x = X[:rows]
    out = amp(x)
    out.sum().backward()
    results.put(out.detach().tolist())


@pytest.mark.parametrize("way, rows", [("fork", 4), ("fork", 3), *(pytest.param("spawn", rows, marks=pytest.mark.slow) for rows in (3, 4))])
def test_a_child_process_runs_a_model_of_its_parent(way, rows):
    """With the shape that the parent has captured, and with another."""
    amp = amprewrite.rewrite(net(), dtype="bf16")
    want = amp(X)[:rows]
    context = multiprocessing.get_context(way)
    results = context.Queue()
    child = context.Process(target=_call, args=(amp, rows, results))
    child.start()
    got = torch.tensor(results.get(timeout=120))
    child.join(60)
    assert child.exitcode == 0
    torch.testing.assert_close(got, want.detach(), rtol=1e-2, atol=1e-2)


def _rank(rank: int, file: str, results) -> None:
    import datetime

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
    )
    amp = amprewrite.rewrite(nn.parallel.DistributedDataParallel(net()), dtype="bf16")
    optimizer = torch.optim.SGD(amp.parameters(), 0.1)
    for step in range(4):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.perf_counter()
        try:
            amp(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        except RuntimeError as error:
            results.put((step, time.perf_counter() - began, str(error)))
            return
    results.put((4, 0.0, "no error"))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("way", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.long
def test_a_rank_that_dies_gives_the_other_an_error_within_seconds(tmp_path, way):
    context = multiprocessing.get_context(way)
    context.set_forkserver_preload(["amprewrite.runtime.model.rewritten"])  # the server imports once what both ranks need
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path / "store"), results)) for rank in range(2)]
    for each in ranks:
        each.start()
    step, seconds, said = results.get(timeout=200)
    for each in ranks:
        each.join(30)
        each.kill()
    assert step == 2 and seconds < 20, (step, seconds, said)


def test_threads_that_call_train_and_capture_one_model_all_get_right_results():
    amp, model = amprewrite.rewrite(net(), dtype="bf16"), net()
    wrong: list[str] = []
    start = threading.Barrier(8)

    def one(number: int) -> None:
        start.wait()
        for turn in range(6):
            x = X[: 1 + (number + turn) % 4]
            try:
                with torch.set_grad_enabled(number % 2 == 0):
                    torch.testing.assert_close(amp(x), model(x), rtol=3e-2, atol=3e-2)
            except Exception as error:
                wrong.append(f"{number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
