"""Writers that are killed, interrupted, starved of disk or raced: the old file or the new one stands there, whole, and nothing else."""

from __future__ import annotations

import ast
import os
import random
import resource
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx_help import gemm_chain, node, noise
from tally import Tally
from torch import nn

import amprewrite
from amprewrite import Calibration, CaptureError, EmitError, PolicyError
from amprewrite.api.cli.main import main
from amprewrite.api.cli.models import save_program
from amprewrite.graphs.onnx.read.load import load
from amprewrite.graphs.onnx.run.onnx_runtime import session
from amprewrite.graphs.onnx.write.save import written
from amprewrite.report.cast_plan import CastPlan
from amprewrite.tables.boundary.files import MARK, scratch_path, write_text

ROOT = Path(__file__).resolve().parent.parent.parent
Write = Callable[[Path, int], None]
"""Writes version 0 or 1 of a file."""


@pytest.fixture(scope="module")
def plans() -> list[CastPlan]:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    plan = amprewrite.plan(model, (torch.randn(2, 4),), dtype="bf16")
    return [plan, plan.edit({"gelu": "high"})]


@pytest.fixture(scope="module")
def calibrations() -> list[Calibration]:
    found = amprewrite.calibrate(nn.Linear(4, 4), [torch.randn(2, 4)])
    return [found, found | found]


@pytest.fixture(scope="module")
def programs() -> list[torch.export.ExportedProgram]:
    return [torch.export.export(nn.Linear(4, size), (torch.randn(2, 4),)) for size in (4, 5)]


def onnx_version(which: int) -> ir.Model:
    """The same net with other weights; each of its data files is some kilobytes."""
    model = gemm_chain(node("Relu", ["h"], ["mid"], name="act")).model
    for tensor in model.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor) * (which + 1)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    model.doc_string = f"version {which}"
    return ir.from_proto(model)


@pytest.fixture
def writers(plans, calibrations, programs) -> dict[str, Write]:
    def model(path: Path, which: int) -> None:
        with written(onnx_version(which), path, False) as made:
            made.keep({})

    def outside(path: Path, which: int) -> None:
        with written(onnx_version(which), path, True) as made:
            made.keep({path.with_suffix(".json"): plans[which].to_json()})

    return {
        "plan": lambda path, which: write_text(path, plans[which].to_json()) and None,
        "svg": lambda path, which: plans[which].to_svg(path) and None,
        "dot": lambda path, which: plans[which].to_dot(path) and None,
        "model explorer": lambda path, which: plans[which].to_model_explorer(path) and None,
        "calibration": lambda path, which: calibrations[which].save(path),
        "pt2": lambda path, which: save_program(programs[which], path),
        "onnx": model,
        "onnx and data": outside,
    }


KINDS = ["plan", "svg", "dot", "model explorer", "calibration", "pt2", "onnx", "onnx and data"]


def content(path: Path) -> list[bytes]:
    """What a reader gets: of a model with data outside, its results, too."""
    if path.suffix == ".onnx":
        model = onnx.load(path)  # fails if the data is missing
        runner = session(str(path))
        return [model.doc_string.encode(), runner.run(None, {"x": noise(4, 16)})[0].tobytes()]
    if path.suffix == ".pt2":
        return [str(tuple(torch.export.load(path).state_dict["weight"].shape)).encode()]
    return [path.read_bytes()]


def target(folder: Path, kind: str) -> Path:
    return folder / {"pt2": "m.pt2", "onnx": "m.onnx", "onnx and data": "m.onnx"}.get(kind, "m.json")


def both(folder: Path, kind: str, write: Write) -> list[list[bytes]]:
    """Contents of both versions, and version 0 in place."""
    path, found = target(folder, kind), []
    for which in (1, 0):
        write(path, which)
        found.append(content(path))
    return found


def in_child(work: Callable[[], None], seconds: float | None = None) -> int:
    """Run `work` in a fork, killed after `seconds`; its wait status."""
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def dying(calls: int) -> None:
    """From now on, the process is killed before its n-th change of the file system."""
    left = [calls]

    def wrapped(name: str) -> None:
        real = getattr(os, name)

        def patched(*args, **kwargs):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, patched)

    for name in ("replace", "rename", "link", "unlink", "fsync", "chmod", "mkdir", "rmdir", "open"):
        wrapped(name)


def assert_whole(folder: Path, kind: str, write: Write, allowed: list[list[bytes]]) -> None:
    """One of both versions is there; the next write sweeps up what was left."""
    path = target(folder, kind)
    assert content(path) in allowed
    write(path, 0)
    assert content(path) == allowed[1]
    names = {each.name for each in folder.iterdir()}
    assert not [name for name in names if name.startswith(MARK)], names
    data = [name for name in names if name.endswith(".data")]
    assert len(data) == (kind == "onnx and data"), names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_a_kill_before_any_change_of_the_file_system(tmp_path: Path, writers: dict[str, Write], kind: str) -> None:
    write, path = writers[kind], target(tmp_path, kind)
    allowed = both(tmp_path, kind, write)
    for calls in range(1, 60):

        def work(calls: int = calls) -> None:
            dying(calls)
            write(path, 1)

        killed = in_child(work) != 0
        assert_whole(tmp_path, kind, write, allowed)
        if not killed:  # it came to its end
            assert calls > 4
            return
    raise AssertionError("the write never ended")


@pytest.mark.parametrize("times", [5, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_kills_at_random_moments(tmp_path: Path, writers: dict[str, Write], tally: Tally, kind: str, times: int) -> None:
    tally.data["row"] = f"kill -9: {kind}"
    write, folder, rng, path = writers[kind], tmp_path, random.Random(times), target(tmp_path, kind)
    allowed = both(folder, kind, write)

    def work() -> None:
        for turn in range(10**6):
            write(path, turn % 2)

    for _ in range(times):
        assert in_child(work, rng.uniform(0.0, 0.05)) == signal.SIGKILL
        tally.kill(lambda: assert_whole(folder, kind, write, allowed))
    tally.settle()


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, writers: dict[str, Write], kind: str) -> None:
    write, path = writers[kind], target(tmp_path, kind)
    allowed = both(tmp_path, kind, write)
    answer = tmp_path / "answer"

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
        try:
            write(path, 1)
        except EmitError as error:
            answer.write_text(str(error)[:250])

    in_child(work)
    assert "cannot be" in answer.read_text()
    answer.unlink()
    assert content(path) == allowed[1]
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(MARK)]


@pytest.mark.parametrize("moment", [0, 1, 2])
def test_an_interrupt_between_renames_takes_everything_back(
    tmp_path: Path, writers: dict[str, Write], monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    allowed = both(tmp_path, "onnx and data", writers["onnx and data"])
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    replace, moves = Path.replace, []

    def interrupted(self: Path, to: Path) -> Path:
        done = replace(self, to)
        moves.append(to)
        if len(moves) == moment + 1:
            raise KeyboardInterrupt
        return done

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writers["onnx and data"](tmp_path / "m.onnx", 1)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    assert content(tmp_path / "m.onnx") == allowed[1]


@pytest.mark.parametrize("seconds", [1.5, pytest.param(20, marks=pytest.mark.slow)])
def test_readers_beside_writers_never_load_a_mix(tmp_path: Path, writers: dict[str, Write], seconds: float) -> None:
    write, path = writers["onnx and data"], tmp_path / "m.onnx"
    allowed = [found[0] + b"|" + found[1] for found in both(tmp_path, "onnx and data", write)]
    pids = []
    for seed in (0, 1):
        pid = os.fork()
        if not pid:
            try:
                for turn in range(10**6):
                    write(path, (turn + seed) % 2)
            finally:
                os._exit(1)
        pids.append(pid)
    try:
        began, loads = time.monotonic(), 0
        while time.monotonic() < began + (seconds if loads > 5 else 60):  # five at least, on a machine where others work, too
            try:
                model = load(path)
            except CaptureError:  # it was replaced twenty times meanwhile
                continue
            weights = b"".join(value.const_value.numpy().tobytes() for value in model.graph.initializers.values())
            loads += 1
            scale = np.frombuffer(weights, np.float32)[0]
            seen = f"{model.doc_string} {scale:.4g}"
            assert seen in expected(), seen
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert loads > 5 and allowed


def expected() -> list[str]:
    first = [next(iter(onnx_version(which).graph.initializers.values())).const_value.numpy().ravel()[0] for which in (0, 1)]
    return [f"version {which} {scale:.4g}" for which, scale in enumerate(first)]


def test_threads_that_write_one_file(tmp_path: Path, plans: list[CastPlan]) -> None:
    texts, problems = [plan.to_json() for plan in plans], []

    def work(which: int) -> None:
        try:
            for _ in range(20):
                write_text(tmp_path / "p.json", texts[which])
                assert (tmp_path / "p.json").read_text() in texts
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems and [each.name for each in tmp_path.iterdir()] == ["p.json"]


# -- what stands at the target ------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_modes_and_links_stay(tmp_path: Path, writers: dict[str, Write], kind: str) -> None:
    real, link = target(tmp_path, kind), target(tmp_path, kind).with_name(f"link{target(tmp_path, kind).suffix}")
    writers[kind](real, 0)
    assert stat.S_IMODE(real.stat().st_mode) == 0o666 & ~mask()
    real.chmod(0o640)
    link.symlink_to(real.name)
    writers[kind](link, 1)
    assert link.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o640
    if kind == "onnx and data":
        assert len(list(tmp_path.glob("m.onnx.*.data"))) == 1
    assert content(real)


def mask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_devices_pipes_and_folders_are_refused(tmp_path: Path, writers: dict[str, Write], kind: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, says in ((Path("/dev/null"), "a device"), (pipe, "a device, a pipe"), (tmp_path, "is a folder")):
        with pytest.raises(EmitError, match=says):
            writers[kind](path, 0)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode) and [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_bad_paths_are_clear_errors(tmp_path: Path, plans: list[CastPlan]) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (tmp_path / ("n" * 300), "a\0b", tmp_path / "gone" / "p.svg", loop, tmp_path / "loop" / "p.svg", ""):
        with pytest.raises(EmitError) as caught:
            plans[0].to_svg(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(PolicyError, match="a path is a string or a Path, not int"):
        plans[0].to_html(3)


def test_a_folder_where_nothing_can_be_written(writers: dict[str, Write]) -> None:
    for kind in KINDS:
        with pytest.raises(EmitError, match="cannot be written"):
            writers[kind](target(Path("/proc"), kind), 0)


def test_scratch_files_of_the_living_stay(tmp_path: Path) -> None:
    """Our own, those of a process that runs, and those that are not ours by name."""
    own, other = scratch_path(tmp_path), tmp_path / f"{MARK}notes"
    for path in (own, other):
        path.write_text("kept")
    write_text(tmp_path / "a.txt", "a")
    assert own.exists() and other.exists()
    far = tmp_path / f"{MARK}00000000-1-1-ffffffff"
    far.write_text("of another machine")
    write_text(tmp_path / "a.txt", "b")
    assert far.exists()
    os.utime(far, (time.time() - 7200,) * 2)
    write_text(tmp_path / "a.txt", "c")
    assert not far.exists()


def test_data_inside_again_removes_the_data_file(tmp_path: Path, writers: dict[str, Write]) -> None:
    path = tmp_path / "m.onnx"
    ir.save(onnx_version(0), path, external_data="m.onnx.data", size_threshold_bytes=0)
    writers["onnx"](path, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["m.onnx"]


def test_data_that_another_model_reads_stays(tmp_path: Path, writers: dict[str, Write]) -> None:
    path = tmp_path / "m.onnx"
    writers["onnx and data"](path, 0)
    shutil.copy(path, tmp_path / "copy.onnx")
    writers["onnx and data"](path, 1)
    assert len(list(tmp_path.glob("m.onnx.*.data"))) == 2
    assert content(tmp_path / "copy.onnx")[0] == b"version 0"


# -- the command line ----------------------------------------------------------------------------
@pytest.mark.parametrize("old", ["the source", "an older file", "nothing"])
def test_a_bar_that_is_missed_leaves_out_alone(tmp_path: Path, old: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "m.onnx"
    onnx.save(gemm_chain(node("Relu", ["h"], ["mid"], name="act")).model, source)
    out = source if old == "the source" else tmp_path / "out.onnx"
    if old == "an older file":
        out.write_bytes(b"old")
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    assert main(["convert", str(source), str(out), "--max-rel-err", "1e-9"]) == 1
    assert "nothing was written" in capsys.readouterr().out
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_a_bar_that_is_missed_leaves_a_program_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), (torch.randn(2, 16),)), source)
    before = source.read_bytes()
    assert main(["convert", str(source), str(source), "--dtype", "bf16", "--max-rel-err", "1e-9"]) == 1
    assert source.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["m.pt2"]
    assert "nothing was written" in capsys.readouterr().out


# -- the house ---------------------------------------------------------------------------------------
def test_one_file_writes_all_others() -> None:
    """Nothing else opens a file to write it; logs are appended to."""
    own = {"files.py", "training_log.py"}
    for path in [*(ROOT / "amprewrite").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]:
        if path.name in own:
            continue
        for call in (each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            place = f"{path.name}:{call.lineno}"
            if name == "write_text" or name == "write_bytes":
                assert isinstance(call.func, ast.Name), place
            words = [each.value for each in (*call.args, *(k.value for k in call.keywords)) if isinstance(each, ast.Constant)]
            if name in ("open", "fdopen", "FileIO"):
                assert not [word for word in words if isinstance(word, str) and set(word) & set("wax+") and len(word) < 4], place
            assert name not in ("mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryDirectory"), place
