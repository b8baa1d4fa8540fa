"""The command line: every command as a process, and every kind of bad input as one line and status 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.api.cli import output
from amprewrite.api.cli.main import EXAMPLES, main
from amprewrite.report.cast_plan import CastPlan

ROOT = Path(__file__).resolve().parents[2]
MODELS = '''
import sys
import torch
from torch import nn

def good():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), torch.randn(2, 16)

class Cancels(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.same = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 32, bias=False)
        nn.init.eye_(self.same.weight)
    def forward(self, x, *, shift):
        shift = self.same(shift)  # a product, which may be rounded
        return self.down((self.up(x) + shift) - shift)

def cancels():
    torch.manual_seed(0)
    return Cancels(), (torch.randn(4, 16),), {"shift": torch.full((4, 32), 4096.0)}

def batches():
    torch.manual_seed(1)
    return [torch.randn(2, 16) for _ in range(3)]

def leaves(): sys.exit(0)
def raises(): raise ValueError("the weights are on another machine")
def needs(width, depth=2): ...
def wrong(): return 42
def no_model(): return "model", ()
def no_inputs(): return nn.Linear(2, 2), 3.0
def no_kwargs(): return nn.Linear(2, 2), (torch.randn(3, 2),), [1]
def breaks(): return nn.Linear(2, 2), torch.randn(3, 5)
number = 7
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of models, a plan, and files that are nothing."""
    name = f"models_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text("import there_is_no_such_thing\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit()\n")
    (tmp_path / "noise.onnx").write_bytes(b"\x00\x01 no protobuf")
    (tmp_path / "noise.pt2").write_bytes(b"PK no archive")
    (tmp_path / "noise.json").write_text("{")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def models(folder: Path) -> str:
    return f"models_{folder.name}"


def process(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "amprewrite", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)


# as processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_plan_as_a_process_writes_everything(folder: Path) -> None:
    paths = ["--html", "r.html", "--svg", "p.svg", "--dot", "p.dot", "--model-explorer", "m.json", "-o", "p.json"]
    done = process(folder, "plan", f"{models(folder)}:good", "--dtype", "bf16", *paths)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "3 ops in 1 graph: 3 low (bf16)" in done.stdout
    assert max(map(len, done.stdout.splitlines()[2:])) <= 80
    assert "\x1b" not in done.stdout
    assert (folder / "r.html").read_text().startswith("<!doctype html>")
    assert (folder / "p.svg").read_text().startswith("<svg") and (folder / "p.dot").read_text().startswith("digraph")
    assert CastPlan.from_json((folder / "p.json").read_text()).low == "bf16"
    assert set(json.loads((folder / "m.json").read_text())["main"]["results"]) == {"linear", "gelu", "linear_1"}


@pytest.mark.long
def test_explain_as_a_process(folder: Path) -> None:
    done = process(folder, "explain", f"{models(folder)}.py:good", "gelu", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gelu in 1 runs low (bf16) because") and "overrides={'node:gelu': 'fp32'}" in done.stdout


@pytest.mark.long
def test_diff_as_a_process_has_the_status_of_diff(folder: Path) -> None:
    plan = amprewrite.plan(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), (torch.randn(2, 4),), dtype="bf16")
    (folder / "a.json").write_text(plan.to_json())
    (folder / "b.json").write_text(plan.edit({"gelu": "high"}).to_json())
    done = process(folder, "diff", "a.json", "b.json")
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, "gelu: low -> high (the given plan says so)")


@pytest.mark.long
def test_verify_and_convert_as_processes(folder: Path) -> None:
    word = f"{models(folder)}:good"
    done = process(folder, "verify", word, "--dtype", "bf16", "--max-rel-err", "1e-9")
    assert done.returncode == 1 and "above --max-rel-err 1e-09" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    done = process(folder, "convert", word, "mixed.pt2", "--dtype", "bf16", "--json")
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout)["error"] < 0.02
    x = torch.randn(2, 16)
    assert torch.export.load(folder / "mixed.pt2").module()(x).dtype == torch.float32


@pytest.mark.long
def test_debug_as_a_process(folder: Path) -> None:
    done = process(folder, "debug", f"{models(folder)}:cancels", "--dtype", "bf16", "--suggest")
    assert done.returncode == 1, done.stderr
    assert "cancellation at sub" in done.stdout and "the bits were lost at add" in done.stdout
    assert done.stdout.splitlines()[-1] == "overrides={'node:sub': 'fp32'}"  # the add then costs less in fp32, too


@pytest.mark.long
def test_calibrate_as_a_process(folder: Path) -> None:
    name = models(folder)
    done = process(folder, "calibrate", f"{name}:good", f"{name}:batches", "-o", "ranges.json")
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "values in 3 batches" in done.stdout and "gelu" in done.stdout and max(map(len, done.stdout.splitlines())) <= 82
    held = amprewrite.Calibration.load(folder / "ranges.json")
    assert (held.batches, set(held.regions[0].values)) > (2, set())
    done = process(folder, "plan", f"{name}:good", "--dtype", "fp16", "--calibration", "ranges.json", "--nodes")
    assert done.returncode == 0 and "3 ops in 1 graph: 3 low (fp16)" in done.stdout, done.stderr


@pytest.mark.parametrize("command", ["lists", "passes", "devices"])
@pytest.mark.long
def test_tables_as_processes(folder: Path, command: str) -> None:
    done = process(folder, command)
    assert done.returncode == 0 and not done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80 and "\x1b" not in done.stdout


@pytest.mark.long
def test_bad_input_as_a_process(folder: Path) -> None:
    done = process(folder, "plan", f"{models(folder)}:raises")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "raised ValueError: the weights are on another machine" in done.stderr
    done = process(folder, "plan", f"{models(folder)}:raises", "--debug")
    assert done.returncode == 1 and "Traceback" in done.stderr
    done = process(folder, "explain")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


@pytest.mark.long
def test_a_reader_that_leaves_early_is_no_error(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = f"{sys.executable} -m amprewrite lists --json | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)
    assert (done.stdout.strip(), done.stderr) == ("[", "")


# in this process --------------------------------------------------------------------------------------------------------


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = main(arguments)
    except SystemExit as left:
        status = int(left.code or 0)
    found = capsys.readouterr()
    return status, found.out, found.err


@pytest.fixture(autouse=True)
def plain_consoles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich looks for stdout when it prints, so pytest's capture works; no terminal, no colour."""
    for console in (output.OUT, output.ERR):
        monkeypatch.setattr(console, "_force_terminal", False)


BAD = {
    "calibrate {m}:good batches": "'batches' names no batches; name them as package.module:callable",
    "calibrate {m}:good {m}:wrong": "returned an int; it should return an iterable of batches",
    "calibrate {m}:good {m}:good": "batch 0 cannot be run: TypeError",
    "plan {m}:good --calibration gone.json": "no calibration at gone.json",
    "plan {m}:raises": "raised ValueError: the weights are on another machine (models_",
    "plan {m}:leaves": "raised SystemExit: 0 (models_",
    "plan script:model": "importing script raised SystemExit",
    "plan {m}:needs": "needs arguments (width); name a callable that takes none",
    "plan {m}:wrong": "returned an int; it should return (module, inputs)",
    "plan {m}:no_model": "returned a str as the model, not an nn.Module",
    "plan {m}:no_inputs": "returned a float as inputs",
    "plan {m}:no_kwargs": "returned a list as keyword arguments",
    "plan {m}:number": "is an int, no function to call",
    "plan {m}:goood": "has no goood; did you mean good?",
    "plan {m}:breaks --dtype bf16": "(--debug shows where)",
    "plan nowhere.to.find:model": "there is no module nowhere here or installed",
    "plan broken:model": "it imports there_is_no_such_thing, which is not installed",
    "plan no-module:model": "'no-module' is no module name",
    "plan nothing": "'nothing' names no model; name a model as",
    "plan gone.onnx": "there is no file gone.onnx",
    "plan gone.py:model": "there is no file gone.py",
    "plan noise.onnx": "noise.onnx is no ONNX model",
    "plan noise.pt2": "noise.pt2 is no exported program, or a damaged one",
    "plan noise.json": "noise.json: this is no cast plan: not JSON",
    "plan bytes.json": "bytes.json cannot be read",
    "plan {m}:good --dtype int8": "int8",
    "plan {m}:good --lists mine": "lists='mine' is no preset",
    "plan {m}:good --override gelu": "write KEY=KIND",
    "plan {m}:good --override gelo=deny --dtype bf16": "did you mean",
    "plan {m}:good --dtype bf16 --html gone/r.html": "gone/r.html cannot be written: No such file",
    "plan {m}:good --dtype bf16 --svg .": "is a folder; name a file in it",
    "plan {m}:good --svg ''": "'' names no file; give a path",
    "plan {m}:good --errors": "--errors goes into the report of --html",
    "plan {m}:good --depth 0": "--depth is for the pictures of --svg and --png",
    "plan {m}:good --depth 1": "--depth is for the pictures of --svg and --png",
    "plan {m}:good --time-limit 3": "--time-limit is for runs of ONNX files",
    "plan noise.onnx --train": "--train is for PyTorch models",
    "plan noise.onnx --plan gone.json": "there is no file gone.json",
    "calibrate {m}:raises -o .": "is a folder; name a file in it",
    "convert {m}:good out.pt2 --low-io": "--low-io is for .onnx files",
    "convert {m}:good out.pt2 --time-limit 3": "--time-limit is for runs of ONNX files",
    "debug {m}:good --max-rel-err 1e-3": "--max-rel-err is what --suggest aims at",
    "lists softmax --override softmax=deny": "unrecognized arguments: --override",
    "plan {m}:good --time-limit soon": "invalid seconds value: 'soon'",
    "plan {m}:good --code --ops": "not allowed with argument",
    "plan {m}:good --plan {m}.py": "is a file of a kind that is not read",
    "explain {m}:good lineer --dtype bf16": "no node and no module of the plan is called 'lineer'; did you mean linear",
    "convert {m}:good out.txt": "name the result .onnx, or .pt2",
    "convert {m}:good gone/out.pt2": "make the folder first",
    "convert noise.json out.onnx": "this is no cast plan",
    "verify {m}:good --max-rel-err -1": "is no error to allow",
    "plan {m}:good --depth -1": "-1 is no count; give 0 or more",
    "verify {m}:good --max-rel-err much": "invalid",
    "lists sofmax": "there is no op 'sofmax'; did you mean softmax",
    "frobnicate": "invalid choice: 'frobnicate'",
    "": "the following arguments are required: COMMAND",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_status_2(folder: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    if ".onnx" in line:
        pytest.importorskip("onnxscript", reason="pip install 'amprewrite[onnx]'")
    status, out, err = ask(capsys, *(word.strip("'") for word in line.format(m=models(folder)).split()))
    assert (status, out) == (2, ""), err
    assert len(err.splitlines()) == 1 and BAD[line] in err and "Traceback" not in err, err


def test_a_saved_plan_serves_where_no_model_is_needed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(capsys, "plan", f"{models(folder)}:good", "--dtype", "bf16", "-o", "p.json", "--train")[0] == 0
    status, out, _ = ask(capsys, "plan", "p.json", "--code")
    assert status == 0 and out.startswith("# graph0, training: 3 ops")
    assert ask(capsys, "explain", "p.json", "gelu")[1].startswith("gelu in 1 runs low")
    assert ask(capsys, "diff", "p.json", "p.json")[:2] == (0, "")
    status, _, err = ask(capsys, "verify", "p.json")
    assert status == 2 and "a saved plan is none" in err


@pytest.mark.parametrize("asked", ["--dtype fp16", "--override gelu=deny", "--train", "--plan p.json", "--run-on cpu", "--lists tf"])
def test_a_saved_plan_takes_no_option_that_decides(folder: Path, capsys: pytest.CaptureFixture[str], asked: str) -> None:
    """They did nothing, silently: the plan was shown as it was saved."""
    good = f"{models(folder)}:good"
    assert ask(capsys, "plan", good, "--dtype", "bf16", "-o", "p.json")[0] == 0
    option, *rest = asked.split()
    status, out, err = ask(capsys, "plan", "p.json", option, *rest)
    assert (status, out) == (2, "") and err.startswith(f"amprewrite: {option} plans a model, and a saved plan is decided already")
    if option != "--plan":  # diff has none
        assert ask(capsys, "diff", "p.json", "p.json", option, *rest)[0] == 2
        assert ask(capsys, "diff", "p.json", good, option, *rest)[0] in (0, 1)


def test_an_exported_program_is_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    torch.export.save(torch.export.export(model, (torch.randn(2, 8),)), folder / "model.pt2")
    status, out, err = ask(capsys, "plan", "model.pt2", "--dtype", "fp16", "--ops")
    assert status == 0, err
    assert out.splitlines()[1].split()[:3] == ["linear", "1", "-"]


def test_an_onnx_file_is_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    torch.onnx.export(model, (torch.randn(2, 8),), folder / "model.onnx", dynamo=True, verbose=False)
    capsys.readouterr()
    status, out, err = ask(capsys, "plan", "model.onnx", "--json")
    assert status == 0, err
    assert CastPlan.from_json(out).low == "fp16"
    status, out, err = ask(capsys, "convert", "model.onnx", "mixed.onnx", "--max-rel-err", "0.01")
    assert status == 0 and (folder / "mixed.onnx").is_file(), err
    status, out, err = ask(capsys, "convert", "model.onnx", "worse.onnx", "--max-rel-err", "1e-12")
    assert status == 1 and not (folder / "worse.onnx").exists()
    assert ask(capsys, "verify", "model.onnx", "--max-rel-err", "1e-12")[0] == 1


def test_a_plan_is_followed_for_an_onnx_file_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--plan did nothing for a file, silently."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    torch.onnx.export(model, (torch.randn(2, 8),), folder / "model.onnx", dynamo=True, verbose=False)
    capsys.readouterr()
    assert ask(capsys, "plan", "model.onnx", "--override", "Gemm=deny", "-o", "p.json")[0] == 0
    status, out, err = ask(capsys, "plan", "model.onnx", "--plan", "p.json", "--json")
    assert status == 0 and not CastPlan.from_json(out).diff(CastPlan.from_json((folder / "p.json").read_text())), err
    assert json.loads(ask(capsys, "verify", "model.onnx", "--plan", "p.json", "--json")[1])["error"] == 0
    assert ask(capsys, "plan", f"{models(folder)}:good", "--dtype", "fp16", "-o", "other.json")[0] == 0
    status, _, err = ask(capsys, "verify", "model.onnx", "--plan", "other.json")
    assert status == 2 and "the plan is for another model" in err


def test_a_program_in_a_file_has_no_mode_to_advise_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch says that its module is in training, which it never leaves, and the advice was to call eval(), which it refuses."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
    torch.export.save(torch.export.export(model, (torch.randn(2, 8),)), folder / "model.pt2")
    status, out, err = ask(capsys, "convert", "model.pt2", "out.onnx", "--dtype", "fp16")
    assert status == 0 and "training mode" not in out, err


@pytest.mark.parametrize("command", EXAMPLES)
def test_json_and_help_of_every_command(folder: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    status, out, _ = ask(capsys, command, "--help")
    assert status == 0 and "examples:" in out and "--json" in out
    word = f"{models(folder)}:good"
    rest: dict[str, list[str]] = {
        "plan": [word], "explain": [word, "gelu"], "diff": [word, word], "convert": [word, "out.pt2"], "verify": [word],
        "debug": [word], "calibrate": [word],
    }  # fmt: skip
    policy = ["--dtype", "bf16"] if command in rest and command != "calibrate" else []
    status, out, err = ask(capsys, command, *rest.get(command, []), "--json", *policy)
    assert status == 0, err
    assert isinstance(json.loads(out), list | dict)


def test_the_html_report_holds_errors_where_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", f"{models(folder)}:good", "--dtype", "bf16", "--html", "r.html", "--errors"]
    assert ask(capsys, *arguments)[0] == 0
    data: Any = (folder / "r.html").read_text().split('type="application/json">')[1].split("</script>")[0]
    assert all("e" in node for node in json.loads(data)["nodes"] if node.get("p") == "op")


@pytest.mark.parametrize("form", ["{}:good", "{}.py:good", "./{}.py:good"])
def test_a_report_bears_the_name_of_the_callable(form: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", form.format(models(folder)), "--dtype", "bf16", "--html", "r.html"]
    assert ask(capsys, *arguments)[0] == 0
    assert '"title":"good"' in (folder / "r.html").read_text()


# devices ----------------------------------------------------------------------------------------------------------------


def test_a_plan_for_a_gpu_needs_no_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--device` means what `device=` does in Python."""
    module = next(folder.glob("models_*.py")).stem
    assert main(["plan", f"{module}:good", "--dtype", "bf16", "--device", "H100", "--json"]) == 0
    there = CastPlan.from_json(capsys.readouterr().out)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), torch.randn(2, 16)
    with torch.no_grad():
        assert not there.diff(amprewrite.plan(model.eval(), (x,), dtype="bf16", device="h100"))
    assert main(["plan", f"{module}:good", "--dtype", "bf16", "--json"]) == 0
    here = CastPlan.from_json(capsys.readouterr().out)
    assert {region.priced_on for region in there.regions} == {"h100 (modelled)"} != {region.priced_on for region in here.regions}


@pytest.mark.parametrize("command", [["plan", "m:f"], ["explain", "m:f", "0"], ["diff", "m:f", "m:f"], ["lists"], ["doctor"]])
@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--device", "h1000"], "h1000 is no device that is planned for; known are cpu, cpu-bf16, v100"),
        (["--device", "cuda:0"], "The device that a model runs on is --run-on."),
    ],
)
def test_a_device_that_is_not_planned_for(command: list[str], option: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, *option])
    assert stopped.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["plan", "{}:good"], ["explain", "{}:good", "0"], ["diff", "{}:good", "{}:good"], ["lists", "gelu"], ["doctor"]]
)
def test_a_device_that_is_not_here(command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = next(folder.glob("models_*.py")).stem
    assert main([*(word.format(module) for word in command), "--run-on", "h100"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("amprewrite: --run-on h100: ") and len(said.splitlines()) == 1
    assert main([*(word.format(module) for word in command), "--run-on", "cpu", *["--json"] * (command[0] == "doctor")]) in (0, 1)


@pytest.mark.parametrize("out", ["mixed.pt2", "mixed.onnx"])
def test_convert_follows_a_plan(out: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = next(folder.glob("models_*.py")).stem
    assert main(["plan", f"{module}:good", "--dtype", "fp16", "--override", "linear=deny", "-o", "saved.json"]) == 0
    errors = []
    for given in ([], ["--plan", "saved.json"]):
        capsys.readouterr()
        assert main(["convert", f"{module}:good", out, "--dtype", "fp16", "--json", *given]) == 0
        errors.append(json.loads(capsys.readouterr().out)["error"])
    assert errors[0] > 1e-5 > errors[1]  # the plan keeps all products in fp32
    assert main(["convert", "saved.json", out]) == 2 and "a saved plan as --plan" in capsys.readouterr().err


def test_what_is_decided_or_any_devices_takes_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = next(folder.glob("models_*.py")).stem
    assert main(["plan", f"{module}:good", "--dtype", "bf16", "-o", "saved.json"]) == 0
    assert main(["plan", "saved.json", "--device", "h100"]) == 2 and "a saved plan is decided already" in capsys.readouterr().err
    Path("some.onnx").write_bytes(b"")
    assert main(["plan", "some.onnx", "--device", "h100"]) == 2 and "--device is for PyTorch models" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["nothere:x:", "no[red]where:y", "[/]:z", "models_:smile:x"])
def test_messages_show_what_was_typed(word: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No name becomes a picture, and no bracket a style."""
    assert main(["plan", word]) == 2
    assert word in capsys.readouterr().err


def test_tables_show_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    output.say([("", "layers[0]:x: [bold]"), ("bad", "[red]")])
    output.text("a :smile: [b]")
    assert capsys.readouterr().out == "layers[0]:x: [bold]\n[red]\na :smile: [b]\n"
