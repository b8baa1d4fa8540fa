"""The commands of the command line. Each takes parsed options, prints its result and returns the exit status.

The status is 0 for success, and 1 if a limit is not met, `diff` finds a difference or `debug` finds a fault.
"""

from __future__ import annotations

import argparse
import inspect
import shutil
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from amprewrite.api.cli.models import (
    OnnxModel,
    Source,
    TorchModel,
    UsageError,
    first_line,
    load,
    load_batches,
    save_program,
    torch_model,
)
from amprewrite.api.cli.output import as_json, say, table, text, working
from amprewrite.api.rewrite import plan as make_plan
from amprewrite.api.rewrite import rewrite
from amprewrite.ir.evidence.ranges import Calibration, as_text
from amprewrite.passes import stages
from amprewrite.report.cast_plan import CastPlan
from amprewrite.report.counts import code_lines, fold_table, laid_out, op_table
from amprewrite.report.questions.explain import WhatIf, bare_name, decided_after, progress_rows, region_of
from amprewrite.tables.boundary.arguments import did_you_mean
from amprewrite.tables.boundary.files import resolved, write_text
from amprewrite.tables.devices import DEVICES, device_row, named_device
from amprewrite.tables.errors import AccuracyError
from amprewrite.tables.extras import load_extra
from amprewrite.tables.formats import DEFAULT_LOW, parse_format
from amprewrite.tables.ops.op_lists import OPS, find_op, op_lists
from amprewrite.tables.vocabulary import Colour
from amprewrite.torch_internals.trees import tree_map

Options = argparse.Namespace
accuracy, onnx = partial(load_extra, "accuracy"), partial(load_extra, "ONNX")
"""Functions that import an optional part (extra) of amprewrite and return its module. Their argument names the command, for messages."""


# -- plan, explain, diff ---------------------------------------------------------------------
def plan(options: Options) -> int:
    _check_targets(options.html, options.svg, options.png, options.dot, options.model_explorer, options.output)
    if options.html is None:
        _refuse(options, ("errors",), "goes into the report of --html")
    if options.svg is None and options.png is None:
        _refuse(options, ("depth",), "is for the pictures of --svg and --png")
    found, report = _plan_of(load(options.model, options.trust), options), None
    if options.html and options.errors:
        source = torch_model(load(options.model, options.trust), "plan --errors")
        with working("measuring errors"), _mode(options):
            report = accuracy("plan --errors").debug(_rewritten(source, options), source.args, source.kwargs)
    written = [
        (options.html, lambda path: found.to_html(path, _title(options.model), report)),
        (options.svg, lambda path: found.to_svg(path, options.depth)),
        (options.png, lambda path: found.to_png(path, options.depth)),
        (options.dot, found.to_dot),
        (options.model_explorer, found.to_model_explorer),
        (options.output, lambda path: write_text(path, found.to_json())),
    ]
    for path, write in written:
        if path is not None:
            with working(f"writing {path}"):
                write(path)
    if options.after:
        return _after(found, options)
    if options.json:
        print(found.to_json())
        return 0
    if options.code:
        say(laid_out(list(code_lines(found))))
        return 0
    if options.nodes:
        text(str(found))
        return 0
    if options.ops:
        text(op_table(found))
        return 0
    text(found.summary())
    print()
    say(fold_table(found, max(shutil.get_terminal_size((80, 48)).lines - 8, 12)))  # show as many lines as fit below the summary
    for path, _ in written:
        if path:
            say([("note", f"wrote {path}")])
    return 0


def _after(plan: CastPlan, options: Options) -> int:
    """Print the decisions of the passes up to the pass `options.after`, and return status 0."""
    found = decided_after(plan, options.after)
    if options.json:
        as_json([asdict(each) for each in found])
        return 0
    rows = [(node, colour, by, _cut(why, 60)) for node, colour, by, why in progress_rows(found)]
    say(table(("node", "colour", "decided by", "why"), rows))
    casts, edits = sum(each.casts for each in found), sum(each.edits for each in found)
    say([("note", f"after {options.after}: {casts} cast{'s' * (casts != 1)}, {edits} edit{'s' * (edits != 1)} planned")])
    return 0


def explain(options: Options) -> int:
    found = _plan_of(load(options.model, options.trust), options)
    if options.json:
        as_json([_answer(found, node) for node in (found.find(options.node) if options.node else found.nodes)])
        return 0
    text(found.explain(options.node))
    return 0


def _answer(plan: CastPlan, node: Any) -> dict[str, Any]:
    """Return a node of a plan and the reason for its format, as data for JSON. If known, add the overrides that would change its format."""
    told = asdict(node) | {
        "colour": node.colour.value, "reason": node.reason.name, "kind": node.kind.value if node.kind else None, "why": node.why(),
    }  # fmt: skip
    asked = WhatIf.of(region_of(plan, node)) if node.role == "op" and node.colour is not Colour.PLAIN else None
    if asked is not None:
        bare = bare_name(plan, node)
        for key, change in (("cause", asked.cause(bare)), ("alone", asked.forced(bare))):
            told[key] = change and asdict(change) | {"colour": change.colour.value, "overrides": change.overrides}
    return told


def diff(options: Options) -> int:
    """Print the differences of two plans. Return 0 if there is no difference and 1 otherwise, like diff(1)."""
    sources = [load(word, options.trust) for word in (options.a, options.b)]
    if all(isinstance(source, CastPlan) for source in sources):
        _refuse(options, POLICY, DECIDED)
    here, there = (_plan_of(source, options) for source in sources)
    lines = here.diff(there).splitlines()
    if options.json:
        as_json({"same": not lines, "differences": lines})
    else:
        text("\n".join(lines))
    return 1 if lines else 0


# -- convert, verify, debug ------------------------------------------------------------------------
def convert(options: Options) -> int:
    source, out = load(options.model, options.trust), Path(options.out)
    if isinstance(source, CastPlan):
        raise UsageError("convert takes a model: name a callable, a .pt2 or an .onnx file, and a saved plan as --plan")
    if out.suffix not in (".onnx", ".pt2") or (out.suffix == ".pt2" and isinstance(source, OnnxModel)):
        raise UsageError(f"{out}: name the result .onnx" + ("" if isinstance(source, OnnxModel) else ", or .pt2 for a PyTorch model"))
    _check_targets(out)
    if out.suffix == ".pt2":
        _refuse(options, ("low_io",), "is for .onnx files: a .pt2 file takes and gives what the model does")
    report = _converted(source, out, options)
    error = report["error"]
    met = options.max_rel_err is None or error <= options.max_rel_err
    if options.json:
        as_json(report | {"met": met})
    else:
        for line in report["lines"]:
            say([("", line)])
        if not met:
            say([("bad", f"the error is {error:.3g}, asked for at most {options.max_rel_err:g}: nothing was written")])
    return 0 if met else 1


def _converted(source: TorchModel | OnnxModel, out: Path, options: Options) -> dict[str, Any]:
    """Convert a model and return a report as data for JSON. If the error exceeds --max-rel-err, `out` is not written."""
    limit = options.max_rel_err
    try:
        if isinstance(source, OnnxModel):
            with working("converting"):
                asked = _onnx_options(options)
                result = onnx("convert").rewrite_onnx(source.path, out, **asked, keep_io=not options.low_io, max_rel_err=limit)
        else:
            amp = _rewritten(source, options)
            with working("exporting"), torch.no_grad():
                if out.suffix == ".pt2":
                    return _exported(amp, source, out, limit)
                result = amp.export_onnx(
                    out, source.args, source.kwargs, keep_io=not options.low_io, max_rel_err=limit, time_limit=options.time_limit
                )
    except AccuracyError as error:
        if error.result is None:
            raise
        result = error.result
    lines = [*result.plan.summary().splitlines(), *str(result.report).splitlines()]
    return {"out": str(out), "error": result.report.strict_error, "lines": [*lines, f"wrote {out}"] if result.path else lines}


def _exported(amp: Any, source: TorchModel, out: Path, limit: float | None) -> dict[str, Any]:
    """Export to a .pt2 file and return a report. Nothing is written if the error exceeds `limit`."""
    program = amp.export_program(source.args, source.kwargs)
    error: float = accuracy("convert").verify(amp, source.args, source.kwargs).output_error
    lines = [f"relative L2 error under strict rounding: {error:.3g}"]
    if limit is None or error <= limit:
        save_program(program, out)
        lines.append(f"wrote {out}")
    return {"out": str(out), "error": error, "lines": lines}


def verify(options: Options) -> int:
    source = load(options.model, options.trust)
    if isinstance(source, CastPlan):
        raise UsageError("verify runs a model and a saved plan is none: name the model, and the plan as --plan")
    if isinstance(source, OnnxModel):
        with working("running both"):
            result = onnx("verify").rewrite_onnx(source.path, None, **_onnx_options(options))
        error, told = result.report.strict_error, str(result.report)
        data: dict[str, Any] = {"error": error, "runtime_error": result.report.runtime_error, "low": result.plan.low}
    else:
        amp = _rewritten(source, options)
        with working("running both"), _mode(options):
            report = accuracy("verify").verify(amp, source.args, source.kwargs)
        error, told = report.output_error, str(report)
        rows = [asdict(row) | {"colour": row.colour.value} for row in report.worst(options.top)]
        captured = {"capture_error": report.capture_error, "parted": report.parted}
        data = {"error": error, **captured, "low": report.low, "notes": list(report.notes), "worst": rows}
    met = options.max_rel_err is None or (error is not None and error <= options.max_rel_err)
    if options.json:
        as_json(data | {"met": met})
        return 0 if met else 1
    text(told)
    if not met:
        said = "was not measured" if error is None else f"is {error:.3g}"
        say([("bad", f"the output error {said}, above --max-rel-err {options.max_rel_err:g}")])
    return 0 if met else 1


def debug(options: Options) -> int:
    source = torch_model(load(options.model, options.trust), "debug")
    if not options.suggest:
        _refuse(options, ("max_rel_err",), "is what --suggest aims at")
    amp = _rewritten(source, options)
    with working("running low beside fp32"), _mode(options):
        report = accuracy("debug").debug(amp, source.args, source.kwargs, backward=options.train)
    overrides = None
    if options.suggest:
        with working("bisecting"), _mode(options):
            overrides = report.suggest_overrides(options.max_rel_err)
    if options.json:
        keys = ("kind", "seen", "lost", "source", "detail", "backward")
        found = ((f.kind, f.row.name, f.lost_at.name, f.lost_at.source, f.detail, f.backward) for f in report.findings)
        findings = [dict(zip(keys, each, strict=True)) for each in found]
        as_json({"error": report.output_error, "low": report.low, "findings": findings, "overrides": overrides})
    else:
        text(str(report))
        if overrides is not None:
            say([("good", f"overrides={overrides}")])
    return 1 if report.findings else 0


def calibrate(options: Options) -> int:
    _check_targets(options.output)
    source = torch_model(load(options.model, options.trust), "calibrate")
    batches = load_batches(options.batches) if options.batches else [None]
    source = _on_device(source, options)

    def on_inputs(model: Any, batch: Any) -> Any:
        return model(*source.args, **source.kwargs)

    if options.run_on and options.batches:
        batches = (tree_map(lambda leaf: leaf.to(options.run_on) if isinstance(leaf, torch.Tensor) else leaf, b) for b in batches)
    found = accuracy("calibrate").calibrate(_set(source.model, options), batches, forward=None if options.batches else on_inputs)
    if options.output is not None:
        write_text(options.output, found.to_json())
    if options.json:
        print(found.to_json())
        return 0
    text(as_text(found.table(options.top), 80).rstrip())
    if options.output:
        say([("note", f"wrote {options.output}")])
    return 0


# -- lists, passes, devices --------------------------------------------------------------------------
def lists(options: Options) -> int:
    fmt = parse_format(options.dtype or DEFAULT_LOW)
    held = op_lists(options.lists, fmt, named_device(options.device).type if options.device else _type(options.run_on or "cuda"))
    if options.op and find_op(options.op) is None:
        raise UsageError(f"there is no op {options.op!r}{did_you_mean(options.op, sorted(OPS), likeness=0.5)}")
    rows = [OPS[find_op(options.op).name]] if options.op else [OPS[name] for name in sorted(OPS)]  # type: ignore[union-attr]
    kinds = [(row, kind.value if (kind := held.kind(row.name)) else "-") for row in rows]
    if options.json:
        as_json([{"op": row.name, "kind": kind, "why": row.why, "spellings": list(row.spellings)} for row, kind in kinds])
        return 0
    colour = {"allow": "low", "deny": "high", "internal": "cast"}
    shown = [(row.name[:34], kind, row.why) for row, kind in kinds]
    room = 80 - max(len(op) for op, _, _ in shown) - len(f"list ({fmt.name})") - 4
    cells = [(op, kind, _cut(why, room)) for op, kind, why in shown]
    say(table(("op", f"list ({fmt.name})", "why"), cells, [colour.get(kind, "") for _, kind, _ in shown]))
    return 0


def _type(device: str) -> str:
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise UsageError(f"--run-on {device}: {first_line(error)}; name a device of PyTorch, such as cpu or cuda:0") from error


def passes(options: Options) -> int:
    rows = []
    for stage, members in stages().items():
        for each in members:
            module = inspect.getmodule(type(each))
            said = (inspect.getdoc(module) or "").split("\n\n")[0].replace("\n", " ")
            rows.append((stage, each.name, said))
    if options.json:
        as_json([{"stage": stage, "pass": name, "what": said} for stage, name, said in rows])
        return 0
    say(table(("stage", "pass", "what it does"), [(stage, name, _cut(said, 45)) for stage, name, said in rows]))
    return 0


def devices(options: Options) -> int:
    here = {device_row("cpu").name, *(device_row(f"cuda:{i}").name for i in range(torch.cuda.device_count()))}
    rows = [(d.name, ", ".join(d.low_formats) or "-", f"{d.bandwidth / 1e9:g} GB/s", "yes" if d.name in here else "") for d in DEVICES]
    if options.json:
        as_json([asdict(device) | {"here": device.name in here} for device in DEVICES])
        return 0
    say(table(("device", "gains from", "memory", "here"), rows, ["low" if row[3] else "" for row in rows]))
    return 0


# -- used by several commands --------------------------------------------------------------------------
POLICY = ("dtype", "lists", "override", "calibration", "time_limit", "train", "device", "run_on", "plan")
"""Names of the options that affect how a plan is decided. They are refused where only saved plans are given."""
DECIDED = "plans a model, and a saved plan is decided already: name the model"


def _refuse(options: Options, names: Iterable[str], why: str) -> None:
    """Raise UsageError if one of the options `names` is given, because it would do nothing here. The message is the option and `why`."""
    for name in names:
        given = getattr(options, name, None)
        if given is not None and given is not False and given not in ([], "default", "auto"):
            raise UsageError(f"--{name.replace('_', '-')} {why}")


def _check_targets(*paths: Any) -> None:
    """Raise an error, before the work starts, if one of the files `paths` cannot be written. A path that is None is not checked."""
    for path in paths:
        if path is not None:
            resolved(path)


def _plan_of(source: Source, options: Options) -> CastPlan:
    if isinstance(source, CastPlan):
        if options.command != "diff":
            _refuse(options, POLICY, DECIDED)
        return source
    if isinstance(source, OnnxModel):
        with working("reading"):
            result = onnx(options.command).rewrite_onnx(source.path, None, **_onnx_options(options), verify=False)
        found: CastPlan = result.plan
        return found
    source = _on_device(source, options)
    with working("capturing"), _mode(options):
        return make_plan(_set(source.model, options), source.args, source.kwargs, **_rewrite_options(options))


def _rewritten(source: TorchModel, options: Options) -> Any:
    source = _on_device(source, options)
    return rewrite(_set(source.model, options), **_rewrite_options(options))


def _on_device(source: TorchModel, options: Options) -> TorchModel:
    return source.to(options.run_on) if options.run_on else source


def _set(model: Any, options: Options) -> Any:
    """Set the model to training or evaluation mode and return it. An exported program has a fixed mode and does not change."""
    return model.train(options.train) if isinstance(model, nn.Module) else model


def _mode(options: Options) -> Any:
    return nullcontext() if options.train else torch.no_grad()


def _rewrite_options(options: Options) -> dict[str, Any]:
    found: dict[str, Any] = {
        "dtype": options.dtype, "lists": options.lists, "overrides": _overrides(options), "device": options.device,
    }  # fmt: skip
    if Path(getattr(options, "out", "")).suffix != ".onnx":
        _refuse(options, ("time_limit",), "is for runs of ONNX files")
    if options.calibration is not None:
        found["calibration"] = Calibration.load(options.calibration)
    return found | _given_plan(options)


def _onnx_options(options: Options) -> dict[str, Any]:
    _refuse(options, ("device", "run_on"), "is for PyTorch models: an ONNX file is planned for any device, and runs where you load it")
    _refuse(options, ("train",), "is for PyTorch models: an ONNX file is for inference")
    found = {"lists": options.lists, "overrides": _overrides(options), "calibration": options.calibration, "time_limit": options.time_limit}
    return found | _given_plan(options) | ({"dtype": options.dtype} if options.dtype is not None else {})


def _given_plan(options: Options) -> dict[str, CastPlan]:
    """Return {"plan": the plan in the file that --plan names}, as keyword arguments of `rewrite`; {} without --plan."""
    if getattr(options, "plan", None) is None:
        return {}
    source = load(options.plan)
    if not isinstance(source, CastPlan):
        raise UsageError(f"--plan {options.plan}: name a plan's .json file")
    return {"plan": source}


def _overrides(options: Options) -> dict[str, str]:
    found = {}
    for word in options.override:
        key, equals, kind = word.rpartition("=")
        if not equals or not key:
            raise UsageError(f"--override {word}: write KEY=KIND, such as softmax=deny or module:encoder.*=fp32")
        found[key] = kind
    return found


def _title(word: str) -> str:
    """Return the heading of a report on the MODEL `word`: the name of a file without its ending, or of a callable without its module."""
    return Path(word).stem if Path(word).is_file() else word.rpartition(":")[2]


def _cut(said: str, width: int) -> str:
    return said if len(said) <= width else f"{said[: width - 1]}…"
