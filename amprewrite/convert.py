"""ONNX, both roads: rewrite an fp32 file that never saw PyTorch, and export a rewritten model.

1. Load, inline local functions, fill in types, raise the opset where the low format needs it.
2. Run samples: reference outputs, and the magnitudes that decide what fits.
3. Read the op graph, run the same deciding passes as for PyTorch graphs, plan the constants.
4. Edit as planned; write beside the target; check, load, run, and measure under true rounding; only then move into place.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as ir_passes

from amprewrite.backends.onnx_file import apply_plan, written
from amprewrite.colour import Colour, OpKind
from amprewrite.errors import AmpRewriteError, CaptureError, EmitError, PolicyError
from amprewrite.formats import FP32, Format, parse_format
from amprewrite.frontends.onnx_file import Reading, read_onnx
from amprewrite.onnx_ops import FLOW, OLDEST, VOCABULARY, constant_tensor, format_of, op_of, opset_taking
from amprewrite.onnx_samples import MOST_BYTES, Feed, Samples, observe, read_feeds, session, weight_bytes
from amprewrite.onnx_weights import Loss
from amprewrite.oplists import OpLists, find_op, op_lists
from amprewrite.pass_base import run_passes
from amprewrite.passes import DECIDE
from amprewrite.plan import Cast, CastPlan, RegionPlan
from amprewrite.policy import Policy, parse_overrides
from amprewrite.program import Program
from amprewrite.strict_onnx import relative_error, strict_outputs

TARGET = "meta"
"""Device whose lists and costs are used: no particular one, a file is made for any accelerator."""
Source = str | Path | onnx.ModelProto | ir.Model


@dataclass(frozen=True)
class OnnxReport:
    """What was checked about a rewritten file, and what it cost."""

    strict_error: float | None = None
    """Relative L2 error of the outputs against fp32, every low result really rounded; None where it was not measured."""
    runtime_error: float | None = None
    """The same as ONNX Runtime computes it here; its CPU provider hides rounding."""
    valid: bool = False
    """Whether onnx.checker's full check was run, and passed."""
    weights_before: int = 0
    weights_after: int = 0
    """Bytes of constants."""
    losses: tuple[Loss, ...] = ()
    """Constants that do not simply round."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        share = self.weights_after / self.weights_before if self.weights_before else 1.0
        lines = [f"weights: {self.weights_before} -> {self.weights_after} bytes ({share:.2f})"]
        if self.valid:
            lines.append("onnx.checker: full check passed")
        if self.strict_error is not None:
            lines.append(f"relative L2 error under strict rounding: {self.strict_error:.3g}")
        if self.runtime_error is not None:
            lines.append(f"relative L2 error in ONNX Runtime here: {self.runtime_error:.3g}")
        lines += [f"constant {loss}" for loss in self.losses]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class OnnxResult:
    """A rewritten ONNX model, its plan and what was found out about it."""

    plan: CastPlan
    report: OnnxReport
    path: Path | None
    """Where it was written; None where it was only made."""
    ir_model: ir.Model = field(repr=False)

    @property
    def model(self) -> onnx.ModelProto:
        """The model as a protobuf."""
        return ir.to_proto(self.ir_model)


def rewrite_onnx(
    model: Source,
    out: str | Path | None = None,
    *,
    dtype: Any = "fp16",
    lists: str | OpLists = "default",
    overrides: Mapping[str, str] | None = None,
    calibration: Any = None,
    keep_io: bool = True,
    external_data: bool | str = "auto",
    verify: bool = True,
    max_rel_err: float | None = None,
) -> OnnxResult:
    """Rewrite an fp32 ONNX model into mixed precision, with the passes and lists of `rewrite`.

    Args:
        model: a path, a ModelProto or an onnx_ir model; it is not changed.
        out: where to write; an existing file is only replaced by one that passed all checks. None: write nothing.
        overrides: as for `rewrite`; ops may be named as in ONNX ("Softmax"), modules as torch's exporter recorded them.
        calibration: a mapping of input names to arrays, several of them, or an .npz path. Its magnitudes decide what fits
            the low format; None: made-up inputs do.
        keep_io: inputs and outputs stay fp32.
        external_data: True, False, or "auto": weights go into a file of their own where they do not fit one protobuf.
        verify: full check, load and run in ONNX Runtime, and the error under true rounding.
        max_rel_err: an error under true rounding beyond this raises EmitError, and nothing is written.

    Raises:
        CaptureError: no ONNX model, or one that cannot be read. PolicyError: options that make no sense. EmitError: the
        result cannot be written or fails a check.
    """
    low = parse_format(dtype)
    if low is FP32:
        raise PolicyError("dtype='fp32' leaves nothing to rewrite; use 'fp16' or 'bf16'")
    policy = Policy(low, lists, parse_overrides(_onnx_names(overrides or {}), low))
    if max_rel_err is not None and not verify:
        raise PolicyError("max_rel_err= needs verify=True: without it no error is measured")
    target = _target(out)
    loaded = load(model)
    job = _Job(loaded, policy, keep_io)
    job.prepare()
    job.check_overrides()
    feeds = None if calibration is None else read_feeds(loaded, calibration)
    return job.run(feeds, target, external_data, verify, max_rel_err)


def export_onnx(
    amp: Any,
    path: str | Path,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    opset: int | None = None,
    dynamic_shapes: Any = None,
    keep_io: bool = True,
    external_data: bool | str = "auto",
    verify: bool = True,
) -> OnnxResult:
    """Write a rewritten model as an ONNX file: its plain fp32 twin goes through torch.onnx.export, the result through the passes.

    `args` and `kwargs` are example inputs; they also are the sample run. `opset` and `dynamic_shapes` go to the exporter.
    The model's policy (dtype, lists, overrides) decides. Loss scaling and padding are no part of the file.

    Raises:
        CaptureError: torch.onnx.export cannot export the model. EmitError: the file cannot be written or fails a check.
    """
    from amprewrite.frontends.onnx_export import exported

    target = _target(path)
    model, feed, policy, notes = exported(amp, args, kwargs, opset, dynamic_shapes)
    job = _Job(model, policy, keep_io, notes, exported=True)
    if policy.low is FP32:
        return job.unchanged(target, external_data)
    job.prepare()
    return job.run([feed] if feed else None, target, external_data, verify, None)


def load(source: Source) -> ir.Model:
    """A copy of the model to work on. CaptureError for what is no ONNX model, or lacks its external data."""
    if isinstance(source, ir.Model):
        return source.clone()
    try:
        if isinstance(source, onnx.ModelProto):
            model = ir.from_proto(copy.deepcopy(source))
        elif isinstance(source, str | Path):
            model = ir.load(source)
        else:
            raise PolicyError(f"rewrite_onnx takes a path, a ModelProto or an onnx_ir.Model, not {type(source).__name__}")
    except AmpRewriteError:
        raise
    except FileNotFoundError as error:
        raise CaptureError(f"there is no file {source}; check the path") from error
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise CaptureError(f"{_name(source)} is no ONNX model, or a truncated one ({said}); export it again") from error
    if model.graph is None or not len(model.graph.outputs):
        raise CaptureError(f"{_name(source)} holds no ONNX graph with outputs; export it again")
    for graph in model.graphs():
        for value in graph.initializers.values():
            held = value.const_value
            if isinstance(held, ir.ExternalTensor) and not Path(held.path).is_file():
                where = f"{_name(source)}: the data of {value.name} is missing"
                raise CaptureError(f"{where}: there is no {held.path}; put it beside the model")
    return model


def _name(source: Source) -> str:
    return str(source) if isinstance(source, str | Path) else "the model"


def _target(out: str | Path | None) -> Path | None:
    if out is None:
        return None
    target = Path(out).absolute()
    if not target.parent.is_dir():
        raise EmitError(f"{target} cannot be written: there is no folder {target.parent}; make it first")
    if target.is_dir():
        raise EmitError(f"{target} is a folder; name a file in it")
    return target


def _onnx_names(overrides: Mapping[str, str]) -> dict[str, str]:
    """Op overrides in the vocabulary's words."""
    return {VOCABULARY.get(key, key) if find_op(key) is None else key: word for key, word in overrides.items()}


class _Job:
    """One model on its way from fp32 to mixed."""

    def __init__(self, model: ir.Model, policy: Policy, keep_io: bool, notes: tuple[str, ...] = (), exported: bool = False) -> None:
        self.model, self.policy, self.low, self.keep_io = model, policy, policy.low, keep_io
        self.lists = policy.op_lists(op_lists(policy.lists, policy.low, "cuda"))
        self.notes, self.exported = list(notes), exported
        self.before = constant_bytes(model)

    # -- 1. prepare ------------------------------------------------------------------------
    def prepare(self) -> None:
        model = self.model
        opset = model.opset_imports.get("", 0)
        if opset < OLDEST:
            remedy = "raise it with onnx.version_converter.convert_version"
            raise CaptureError(f"the model is of opset {opset}, older than {OLDEST}; {remedy}")
        if model.functions:
            self.notes.append(f"{len(model.functions)} local functions were inlined")
            ir_passes.InlinePass()(model)
        if any(value.is_graph_input() for value in model.graph.initializers.values()):
            ir_passes.RemoveInitializersFromInputsPass()(model)
            model.ir_version = max(model.ir_version, 4)
            self.notes.append("initialisers that were inputs, too, are constants now")
        self.infer_types()
        self.raise_opset()
        if not any(format_of(v) == "fp32" for g in model.graphs() for n in g for v in n.outputs):
            self.notes.append("no value of the model is fp32: there is nothing to rewrite")

    def infer_types(self) -> None:
        """Fill in missing types and shapes of the top graph; the reader works out those of bodies."""
        missing = {str(v.name): v for n in self.model.graph for v in n.outputs if v.name and v.type is None}
        if not missing or weight_bytes(self.model) > MOST_BYTES:
            return
        try:
            inferred = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(self.model)))
        except Exception as error:
            self.notes.append(f"onnx could not infer types, so ops that read such values stay fp32: {error}")
            return
        plain = (node for node in inferred.graph if node.op_type not in FLOW)  # what a body gives, the reader sees itself
        for value in (v for node in plain for v in node.outputs if v.name in missing):
            if isinstance(value.type, ir.TensorType):
                missing[str(value.name)].type, missing[str(value.name)].shape = value.type, value.shape

    def raise_opset(self) -> None:
        """To the opset at which all listed ops of the model take the low format."""
        opset = self.model.opset_imports[""]
        needed = opset
        for op_type in {n.op_type for g in self.model.graphs() for n in g if not n.domain and self._wants_low(n)}:
            needed = max(needed, opset_taking(op_type, opset, self.low))
        if needed == opset:
            return
        from onnxscript import version_converter

        raised = self.model.clone()
        try:
            version_converter.convert_version(raised, needed, fallback=True)
        except Exception as error:
            self.notes.append(f"opset {opset} could not be raised to {needed} for {self.low.name}: {error}")
            return
        if raised.opset_imports[""] == needed:
            self.model = raised
            least = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", needed)])
            self.model.ir_version = max(raised.ir_version, least)
            self.notes.append(f"opset raised from {opset} to {needed}, at which all its ops take {self.low.name}")

    def _wants_low(self, node: ir.Node) -> bool:
        kind = self.lists.kind(op_of(node))
        return kind not in (None, OpKind.DENY) and any(format_of(value) == "fp32" for value in node.outputs)

    def check_overrides(self) -> None:
        """Every pattern must match something."""
        from amprewrite.frontends.onnx_file import _provenance

        nodes = [node for graph in self.model.graphs() for node in graph]
        self.policy.check_modules({module for node in nodes if (module := _provenance(node)[0])})
        self.policy.check_nodes(node.name or op_of(node) for node in nodes)

    # -- 2 and 3. decide ----------------------------------------------------------------------
    def run(
        self, feeds: list[Feed] | None, target: Path | None, external_data: bool | str, verify: bool, max_rel_err: float | None
    ) -> OnnxResult:
        samples = self.sample(feeds)
        asked = frozenset(o.pattern for o in self.policy.overrides if o.scope == "op")
        reading = read_onnx(self.model, self.low, self.lists, samples, asked, self.keep_io)
        region = decide(reading, self.policy, self.lists)
        apply_plan(self.model, reading, region, self.low)
        for op, count in reading.walls.items():
            self.notes.append(f"{op} is on no list ({count} nodes): it stays fp32")
        plan = CastPlan(self.low.name, (region,), notes=tuple(self.notes), lists=self.policy.lists_name)
        report = OnnxReport(weights_before=self.before, weights_after=constant_bytes(self.model), losses=tuple(reading.losses.values()))
        return self.emit(plan, report, samples, target, external_data, verify, max_rel_err)

    def sample(self, feeds: list[Feed] | None) -> Samples:
        wanted = [v for n in self.model.graph if n.op_type != "Constant" for v in n.outputs if v.name and format_of(v) == "fp32"]
        try:
            samples = observe(self.model, feeds, wanted)
        except PolicyError as error:
            if not self.exported:
                raise
            samples = Samples(problem=str(error))  # the example inputs ran in PyTorch: the user is not to blame
        if samples.problem:
            self.notes.append(f"no sample run, so no ranges are known and range-bound ops stay fp32: {samples.problem}")
        elif samples.made_up:
            self.notes.append("ranges come from a run on made-up inputs; calibration= takes real ones")
        return samples

    # -- 4. emit ---------------------------------------------------------------------------------
    def emit(
        self,
        plan: CastPlan,
        report: OnnxReport,
        samples: Samples,
        target: Path | None,
        external_data: bool | str,
        verify: bool,
        max_rel_err: float | None,
    ) -> OnnxResult:
        if target is None:
            if verify:
                report = self.verify(ir.to_proto(self.model), report, samples, max_rel_err)
            return OnnxResult(plan, replace(report, notes=tuple(self.notes)), None, self.model)
        with written(self.model, target, external_data) as (made, keep):
            if verify:
                report = self.verify(str(made), report, samples, max_rel_err)
            keep()
        return OnnxResult(plan, replace(report, notes=tuple(self.notes)), target, self.model)

    def verify(self, made: str | onnx.ModelProto, report: OnnxReport, samples: Samples, max_rel_err: float | None) -> OnnxReport:
        """Full check, load and run, and the true rounding error. EmitError for what fails."""
        try:
            onnx.checker.check_model(made, full_check=True)
        except Exception as error:
            raise EmitError(f"the rewritten model fails onnx.checker: {error}; please report this model") from error
        runtime = strict = None
        if samples.feeds:
            runtime = self._run_here(made, samples)
            strict = relative_error(samples.outputs, strict_outputs(self.model, samples.feeds))
        if max_rel_err is not None and strict is None:
            raise EmitError("max_rel_err= cannot be kept: the model did not run on samples; pass calibration=")
        if max_rel_err is not None and strict is not None and not strict <= max_rel_err:
            found = f"the relative L2 error under strict rounding is {strict:.3g}"
            raise EmitError(f"{found}, more than {max_rel_err:g}; nothing was written")
        return replace(report, valid=True, runtime_error=runtime, strict_error=strict)

    def _run_here(self, made: str | onnx.ModelProto, samples: Samples) -> float | None:
        try:
            runner = session(made)
        except Exception as error:
            if self.low.name == "bf16":
                self.notes.append("ONNX Runtime has no bf16 kernels for it here; checked, and run under strict rounding only")
                return None
            raise EmitError(f"ONNX Runtime refuses the rewritten model: {error}; please report this model") from error
        kinds = {str(v.name): v.dtype.numpy() for v in self.model.graph.inputs if v.dtype is not None}
        feeds = [{name: np.asarray(array, kinds[name]) for name, array in feed.items()} for feed in samples.feeds]
        return relative_error(samples.outputs, [runner.run(None, feed) for feed in feeds])

    def unchanged(self, target: Path | None, external_data: bool | str) -> OnnxResult:
        """Write the model as it is: its policy is fp32."""
        plan = CastPlan(FP32.name, (RegionPlan("graph", (), ()),), notes=tuple(self.notes), lists=self.policy.lists_name)
        report = OnnxReport(weights_before=self.before, weights_after=self.before)
        return self.emit(plan, report, Samples(), target, external_data, False, None)


def decide(reading: Reading, policy: Policy, lists: OpLists) -> RegionPlan:
    """Run the deciding passes over what was read, then plan the constants; edits nothing."""
    program = Program(reading.graph, policy, lists, name="graph", device=TARGET)
    run_passes(DECIDE, program)
    program.casts += plan_constants(reading, program.colours, policy.low)
    return program.region_plan()


def plan_constants(reading: Reading, colours: dict[str, Colour], low: Format) -> tuple[Cast, ...]:
    """Constants go along with the ops that read them; one low copy serves all that read it low."""
    users: dict[str, dict[str, None]] = {}
    for read in reading.constants:
        if colours[read.partner or read.reader] is Colour.LOW:
            users.setdefault(read.constant, {})[read.reader] = None
    return tuple(
        Cast(constant, low.name, tuple(readers), saturate=_saturates(reading, constant), weight=True) for constant, readers in users.items()
    )


def _saturates(reading: Reading, constant: str) -> bool:
    loss = reading.losses.get(str(reading.values[constant].name))
    return loss is not None and loss.clamped > 0


def constant_bytes(model: ir.Model) -> int:
    """Bytes of initialisers and Constant nodes."""
    held = (constant_tensor(node.outputs[0]) for graph in model.graphs() for node in graph if node.op_type == "Constant")
    return weight_bytes(model) + sum(tensor.nbytes for tensor in held if tensor is not None)
