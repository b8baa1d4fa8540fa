"""Plans, calibrations and programs from files: damaged, of wrong types, or made to hurt."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tally import Tally
from torch import nn

import amprewrite
from amprewrite import AmpRewriteError, Calibration
from amprewrite.api.cli.main import main
from amprewrite.report.cast_plan import CastPlan
from amprewrite.report.html.page import html

VALUES: list[Any] = [
    None, True, -1, 0, 1.5, 10**30, float("nan"), float("inf"), "", "x", "\x1b[31m", "\ud800", "[/]", 'x", URL="javascript:', [], [1],
    ["a"], {}, {"a": 1}, [[1, 2]], "low", "fp32", "a/b", 2**62,
]  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> CastPlan:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 4), nn.Softmax(-1))
    return amprewrite.plan(net, (torch.randn(8, 9),), dtype="bf16", pad="always")


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return amprewrite.calibrate(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), [torch.randn(2, 4)])


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value may be exchanged; of long lists the first three."""
    if path:
        yield path
    pairs = data.items() if isinstance(data, dict) else enumerate(data[:3]) if isinstance(data, list) else ()
    for key, value in pairs:
        yield from places(value, (*path, key))


def changed(text: str, count: int, seed: int) -> Iterator[str]:
    """The text with one value of another kind, `count` times; or with a flipped bit, a cut, a repetition."""
    whole, rng = json.loads(text), random.Random(seed)
    cases = [(path, value) for path in places(whole) for value in VALUES]
    for path, value in rng.sample(cases, min(count, len(cases))):
        data = copy.deepcopy(whole)
        inside = data
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value
        yield json.dumps(data)
    for _ in range(count // 4):
        content = bytearray(text.encode())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        yield content.decode(errors="replace")
        yield text[: rng.randrange(len(text))]


def use_plan(text: str, other: CastPlan) -> None:
    plan = CastPlan.from_json(text)
    printed = [str(plan), plan.summary(), plan.listing(), plan.listing(True), plan.explain(), plan.diff(other), other.diff(plan)]
    printed += [plan.to_svg(), plan.to_dot(), plan._repr_html_(), html(plan, seconds=0)]
    printed += [plan.explain(node.name) for node in plan.nodes[:3] if node.name]
    for each in printed:
        each.encode()
        assert "\x1b" not in each
    unquoted = re.sub(r'"(\\.|[^"\\])*"', "", plan.to_dot())
    assert "URL" not in unquoted and '"' not in unquoted
    assert CastPlan.from_json(plan.to_json()) == plan


def use_calibration(text: str) -> None:
    found = Calibration.from_json(text)
    assert "\x1b" not in str(found)
    str(found).encode()
    _ = found | found
    assert Calibration.from_json(found.to_json()) == found


@pytest.mark.parametrize("count, seed", [(60, 0), pytest.param(2000, 1, marks=pytest.mark.slow)])
def test_changed_plans_are_refused_or_work(plan: CastPlan, tally: Tally, count: int, seed: int) -> None:
    tally.data["row"] = "plan (JSON)"
    for text in changed(plan.to_json(), count, seed):
        tally.case(lambda text=text: use_plan(text, plan))
    tally.settle()
    assert tally.data["refused"] > tally.data["cases"] / 4


@pytest.mark.parametrize("count, seed", [(120, 0), pytest.param(1000, 1, marks=pytest.mark.slow)])
def test_changed_calibrations_are_refused_or_work(calibration: Calibration, tally: Tally, count: int, seed: int) -> None:
    tally.data["row"] = "calibration (JSON)"
    for text in changed(calibration.to_json(), count, seed):
        tally.case(lambda text=text: use_calibration(text))
    tally.settle()
    assert tally.data["refused"] > tally.data["cases"] / 4


HURTFUL = {
    "deep": "[" * 100_000, "deep object": '{"regions":' * 5000, "long number": '{"regions": ' + "9" * 5000 + "}", "array": "[1, 2]",
    "nothing": "", "word": "NaN", "bytes": "\x00\x01",
    "deep version": '{"regions": [], "parameters": "", "version": ' + "[" * 900 + "]" * 900 + "}",
}  # fmt: skip


@pytest.mark.parametrize("name", HURTFUL)
def test_hurtful_text_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for read in (CastPlan.from_json, Calibration.from_json):
        with pytest.raises(AmpRewriteError):
            read(HURTFUL[name])
    path = tmp_path / "p.json"
    path.write_text(HURTFUL[name])
    with pytest.raises(AmpRewriteError, match=r"p\.json"):
        Calibration.load(path)
    assert main(["plan", str(path)]) == 2
    said = capsys.readouterr().err
    assert "p.json" in said and len(said.splitlines()) == 1


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(AmpRewriteError, match=r"p\.json: it is no UTF-8 text"):
        Calibration.load(path)


def test_names_never_steer_a_terminal(
    plan: CastPlan, calibration: Calibration, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Escape sequences of names in a plan's and a calibration's output, whichever command prints them."""
    data = json.loads(plan.to_json())
    evil = "a\x1b]0;owned\x07[/]\u202e\x9b31m"
    for node in data["regions"][0]["nodes"]:
        node["name"], node["source"], node["module"] = evil + node["name"], evil, evil
    data["regions"][0]["notes"], data["notes"] = [evil], [evil]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    for words in (["plan"], ["plan", "--nodes"], ["plan", "--code"], ["explain"], ["plan", "--ops"]):
        assert main([words[0], str(path), *words[1:]]) == 0
    for words in (["explain", str(path), "no\x1b[31m"], ["plan", "no\x1b[31m.onnx"], ["plan", "\x1b[2J"]):
        assert main(words) == 2
    out, err = capsys.readouterr()
    assert "owned" in out and "amprewrite:" in err
    for sign in ("\x1b", "\x07", "\u202e", "\x9b"):
        assert sign not in out + err
    held = json.loads(calibration.to_json())
    held["regions"][0]["values"] = dict.fromkeys([evil], next(iter(held["regions"][0]["values"].values())))
    printed = str(Calibration.from_json(json.dumps(held)))
    assert "\x1b" not in printed and "[/]" in printed


# -- programs ----------------------------------------------------------------------------------
class Evil:
    """What an unpickler is made to run."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def repacked(source: Path, target: Path, changes: dict[str, Any]) -> None:
    """A copy of a program with parts exchanged; a function takes the old content."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            name, content = info.filename.partition("/")[2], old.read(info)
            change = changes.pop(name, None)
            new.writestr(info.filename, change(content) if callable(change) else content if change is None else change)
        for name, content in changes.items():
            new.writestr(f"{old.infolist()[0].filename.partition('/')[0]}/{name}", content)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "good.pt2"
    torch.export.save(torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(2, 4),)), path)
    return path


def pickled_weight(mark: Path) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(Evil(mark), buffer)

    def config(content: bytes) -> bytes:
        return content.replace(b'"use_pickle": false', b'"use_pickle": true', 1)

    return {"data/weights/model_weights_config.json": config, "data/weights/weight_0": buffer.getvalue()}


def calling(old: bytes, new: bytes) -> dict[str, Any]:
    def change(content: bytes) -> bytes:
        assert old in content
        return content.replace(old, new, 1)

    return {"models/model.json": change}


def evil_programs(mark: Path) -> dict[str, dict[str, Any]]:
    buffer = io.BytesIO()
    torch.save(Evil(mark), buffer)
    code = f"__import__('os').system('touch {mark}')"
    return {
        "a pickled weight": pickled_weight(mark),
        "pickled inputs": {"data/sample_inputs/model.pt": buffer.getvalue()},
        "a pickle beside": {"data/weights/model.pt": buffer.getvalue()},
        "an opaque object": {"data/constants/opaque_obj_0": pickle.dumps(Evil(mark))},
        "a call": calling(b"torch.ops.aten.relu.default", b"torch.os.system"),
        "guards": calling(b'"guards_code": []', f'"guards_code": ["{code}"]'.encode()),
        "an expression": calling(b'{"as_int": 2}', f'{{"as_expr": {{"expr_str": "{code}"}}}}'.encode()),
        "a container": calling(b'\\"type\\": \\"builtins.tuple\\"', b'\\"type\\": \\"os.system\\"'),
    }


@pytest.mark.parametrize("kind", evil_programs(Path("mark")))
def test_a_program_that_may_run_code_is_refused(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    mark, path = tmp_path / "mark", tmp_path / "evil.pt2"
    repacked(program, path, evil_programs(mark)[kind])
    for command in (["plan", str(path)], ["verify", str(path)], ["convert", str(path), str(tmp_path / "out.pt2")]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "may run code" in said and "--trust" in said, said
    assert not mark.exists()


def test_a_trusted_program_is_loaded(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "extra.pt2"
    repacked(program, path, {"data/constants/opaque_obj_0": b"x"})
    assert main(["plan", str(path), "--dtype", "bf16"]) == 2
    assert main(["plan", str(path), "--dtype", "bf16", "--trust"]) == 0
    assert main(["plan", str(program), "--dtype", "bf16"]) == 0


@pytest.mark.parametrize("count", [10, pytest.param(250, marks=pytest.mark.slow)])
def test_damaged_programs_are_refused(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tally: Tally, count: int
) -> None:
    tally.data["row"] = "program (.pt2)"
    whole, rng, path = program.read_bytes(), random.Random(count), tmp_path / "m.pt2"

    def plan() -> None:
        status = main(["plan", str(path), "--dtype", "bf16"])
        said = capsys.readouterr().err
        assert status in (0, 2) and "--debug shows where" not in said, said
        if status:
            raise AmpRewriteError(said)

    for _ in range(count):
        content = bytearray(whole)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(content))
        tally.case(plan)
        tally.only(tmp_path, ("m.pt2", "good.pt2"))
    tally.settle()
