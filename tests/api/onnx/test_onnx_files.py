"""What goes wrong with files, and with what users ask for: a clear answer of one line, nothing half written, the input untouched."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from onnx_help import F16, gemm_chain, node, noise

import amprewrite
from amprewrite import AccuracyError, AmpRewriteError, CaptureError, EmitError, PolicyError
from amprewrite.api.onnx.convert import rewrite_onnx
from amprewrite.graphs.onnx.write import apply_plan


def relu() -> onnx.ModelProto:
    return gemm_chain(node("Relu", ["h"], ["mid"], name="act")).model


def stored(path: Path) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in onnx.load(path).graph.initializer}


# -- writing --------------------------------------------------------------------------------
def test_a_good_file_replaces_an_old_one_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(relu(), path)
    rewrite_onnx(path, path)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    assert stored(path) == {"w0": F16, "w1": F16}


def test_an_error_beyond_the_limit_writes_nothing_and_tells_all(tmp_path):
    out = tmp_path / "m.onnx"
    out.write_bytes(b"old")
    with pytest.raises(AccuracyError, match=r"rounding is .*, more than 1e-09; nothing was written") as caught:
        rewrite_onnx(relu(), out, max_rel_err=1e-9)
    assert out.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    assert caught.value.result.report.strict_error > 1e-9
    assert caught.value.result.path is None
    assert rewrite_onnx(relu(), out, max_rel_err=1e-2).path == out


def test_a_report_says_what_was_checked(tmp_path):
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(relu(), source)
    good = rewrite_onnx(source, out, max_rel_err=1e-2)
    assert "3 ops in 1 graph: 3 low (fp16)" in good.plan.summary()
    assert "full check passed" in str(good.report) and "under strict rounding" in str(good.report)
    with pytest.raises(CaptureError, match="there is no file"):
        rewrite_onnx(tmp_path / "none.onnx", out)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_files_are_replaced_all_or_none(tmp_path, monkeypatch, fails_at):
    """Weights, model and plan move one after another; where one cannot, the others go back."""
    out, plan = tmp_path / "m.onnx", tmp_path / "m.json"
    before = {path: path.write_bytes(path.name.encode()) and path.read_bytes() for path in (out, plan)}
    replace, moves = Path.replace, []

    def failing(self, target):
        moves.append(target)
        if len(moves) == fails_at + 1:
            raise OSError(errno.EACCES, "no")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(EmitError, match="cannot be replaced"):
        rewrite_onnx(relu(), out, external_data=True, plan_path=plan)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.long
def test_a_disk_that_fills_up_leaves_nothing(tmp_path):
    """A real write error: the process may write no file beyond 2 kB."""
    source = tmp_path / "in.onnx"
    onnx.save(relu(), source)
    before = source.read_bytes()
    code = f"""
        import resource, signal
        from amprewrite import EmitError, rewrite_onnx
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
        try:
            rewrite_onnx({str(source)!r}, {str(source)!r})
        except EmitError as error:
            print(error)
    """
    env = {**os.environ, "PYTHONPATH": str(Path(amprewrite.__file__).parent.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, check=True, timeout=300)
    assert "cannot be written" in done.stdout
    assert "free some space or give another path" in done.stdout
    assert source.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["in.onnx"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc: a folder in which nobody can write")
def test_a_folder_in_which_nothing_can_be_written():
    with pytest.raises(EmitError, match=r"/proc/m\.onnx cannot be written: .*; give another path"):
        rewrite_onnx(relu(), "/proc/m.onnx")


def test_a_result_that_fails_a_check_is_not_written(tmp_path, monkeypatch):
    """As a bug of ours would: an edit that leaves the graph invalid."""
    edit = apply_plan._tidy

    def spoil(model: ir.Model) -> None:
        edit(model)
        model.graph.node("act").op_type = "NoSuchOp"

    monkeypatch.setattr(apply_plan, "_tidy", spoil)
    out = tmp_path / "m.onnx"
    out.write_bytes(b"old")
    with pytest.raises(EmitError, match=r"fails onnx\.checker: .*please report this model"):
        rewrite_onnx(relu(), out)
    assert out.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


# -- reading -----------------------------------------------------------------------------------
def test_a_file_cut_off_anywhere_is_refused(tmp_path):
    whole, path, out = relu().SerializeToString(), tmp_path / "m.onnx", tmp_path / "out.onnx"
    for length in [*range(0, len(whole), 61), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CaptureError) as caught:
            rewrite_onnx(path, out)
        assert "\n" not in str(caught.value)
        assert path.read_bytes() == whole[:length]
    assert not out.exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n", bytes(range(256)), b'{"json": 1}'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(CaptureError, match="no ONNX") as caught:
        rewrite_onnx(path, tmp_path / "out.onnx")
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_model(tmp_path):
    with pytest.raises(CaptureError, match="cannot be read"):
        rewrite_onnx(tmp_path, tmp_path / "out.onnx")


# -- what is asked -------------------------------------------------------------------------------
BAD = [
    pytest.param(lambda m, tmp: rewrite_onnx(tmp / "none.onnx"), CaptureError, "there is no file", id="missing file"),
    pytest.param(lambda m, tmp: rewrite_onnx(b"no"), PolicyError, "takes a path", id="not a model"),
    pytest.param(lambda m, tmp: rewrite_onnx(m, tmp), EmitError, "is a folder", id="out is a folder"),
    pytest.param(lambda m, tmp: rewrite_onnx(m, tmp / "a" / "b.onnx"), EmitError, "make the folder first", id="no folder"),
    pytest.param(lambda m, tmp: rewrite_onnx(m, dtype="fp32"), PolicyError, "nothing to rewrite", id="fp32"),
    pytest.param(lambda m, tmp: rewrite_onnx(m, dtype="int8"), PolicyError, "not a format", id="unknown dtype"),
    pytest.param(lambda m, tmp: rewrite_onnx(m, overrides={"sofmax": "deny"}), PolicyError, "did you mean", id="unknown op"),
    pytest.param(lambda m, tmp: rewrite_onnx(m, overrides={"node:frist": "fp32"}), PolicyError, "node:first", id="unknown node"),
    pytest.param(lambda m, tmp: rewrite_onnx(m, overrides=["Softmax"]), PolicyError, "takes a dict", id="overrides no dict"),
    pytest.param(lambda m, tmp: rewrite_onnx(m, max_rel_err=0), PolicyError, "takes a relative error", id="no error at all"),
    pytest.param(lambda m, tmp: rewrite_onnx(m, max_rel_err="1e-2"), PolicyError, "takes a relative error", id="an error in words"),
    pytest.param(lambda m, tmp: rewrite_onnx(m, verify=False, max_rel_err=1), PolicyError, "needs verify=True", id="unverified"),
    *(pytest.param(lambda m, tmp, given={option: word}: rewrite_onnx(m, **given), PolicyError, f"{option}= takes True or False, not ",
                   id=f"{option}={word}") for option in ("keep_io", "verify") for word in ("no", None, 0, 2)),
    pytest.param(lambda m, tmp: rewrite_onnx(m, 3), PolicyError, "a path is a string", id="out is a number"),
]


@pytest.mark.parametrize(("call", "error", "says"), BAD)
def test_mistakes_get_an_answer_and_leave_nothing(tmp_path, call, error, says):
    model = relu()
    before = model.SerializeToString()
    with pytest.raises(error, match=says) as caught:
        call(model, tmp_path)
    assert isinstance(caught.value, AmpRewriteError)
    assert "\n" not in str(caught.value)
    assert model.SerializeToString() == before
    assert not list(tmp_path.iterdir())


# -- no runtime -------------------------------------------------------------------------------------
@pytest.fixture
def no_runtime(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)


def test_without_a_runtime_nothing_passes_for_verified(no_runtime, tmp_path):
    with pytest.raises(EmitError) as caught:
        rewrite_onnx(relu(), tmp_path / "m.onnx")
    said = str(caught.value)
    assert "ONNX Runtime is not installed" in said
    assert "pip install 'amprewrite[onnx]' for the CPU, 'amprewrite[onnx-gpu]' for CUDA; verify=False goes without" in said
    assert not list(tmp_path.iterdir())


def test_without_a_runtime_a_model_is_rewritten_unverified(no_runtime, tmp_path):
    result = rewrite_onnx(relu(), tmp_path / "m.onnx", verify=False)
    assert stored(result.path) == {"w0": F16, "w1": F16}
    assert not result.report.valid
    assert any("no sample run" in note and "amprewrite[onnx-gpu]" in note for note in result.report.notes)
    with pytest.raises(EmitError, match="ONNX Runtime is not installed"):
        rewrite_onnx(relu(), verify=False, calibration={"x": noise(4, 16)})
