"""Convert one ONNX model from fp32 to mixed precision: sample, read, decide, edit, write, verify.

1. Run the fp32 model on samples, for reference outputs and ranges of values.
2. Read the op graph, and decide the plan with the same passes as for PyTorch graphs.
3. Edit the model by the plan and write a temporary file. Check, load and run this file, and measure its error under true rounding. Only
   then move it to the target.

Op names hard-coded in this module: `Constant`, a node that may hold a weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from amprewrite.api.onnx.plans import REGION, carry_over, given_region, keep_out
from amprewrite.graphs.onnx.check import invalid, same_complaint
from amprewrite.graphs.onnx.ops import constant_tensor, forget_guesses, format_of, op_of, to_proto
from amprewrite.graphs.onnx.read.evidence import drawing_ops, read_matrix_products, read_offsets, read_repeated, read_summands, with_counts
from amprewrite.graphs.onnx.read.load import Source, make_ready
from amprewrite.graphs.onnx.read.reader import OnnxReading, provenance, read_onnx
from amprewrite.graphs.onnx.run import trial
from amprewrite.graphs.onnx.run.compare import check_raised, is_measurable, relative_error, resized, strict_outputs, tell_of_overflow
from amprewrite.graphs.onnx.run.onnx_runtime import (
    TimeLimit,
    TooSlow,
    is_large,
    may_crash,
    providers,
    run_within,
    runtime,
    seconds_for,
    session,
    weight_bytes,
)
from amprewrite.graphs.onnx.run.samples import Feed, Samples, observe
from amprewrite.graphs.onnx.write.apply_plan import OPSET, apply_plan, insert_quantised
from amprewrite.graphs.onnx.write.save import Written, written
from amprewrite.ir.cost import MatrixProduct
from amprewrite.ir.evidence.constants import Loss
from amprewrite.ir.evidence.ranges import Calibration, RegionRanges, fingerprint
from amprewrite.ir.follow_plan import may_quantise
from amprewrite.ir.pass_base import Problem
from amprewrite.ir.plans.plan import ModelPlan, RegionPlan
from amprewrite.ir.policies.policy import Policy, ProductPolicy, parse_overrides, parse_products
from amprewrite.passes import plan_region
from amprewrite.report.cast_plan import CastPlan
from amprewrite.tables.boundary.arguments import flag, is_flag, is_word, shown
from amprewrite.tables.boundary.files import resolved
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.devices import NAMED, named_device
from amprewrite.tables.errors import AccuracyError, CaptureError, EmitError, PolicyError, one_line
from amprewrite.tables.formats import FORMATS, FP32, TENSOR
from amprewrite.tables.ops.op_lists import OpLists, op_lists
from amprewrite.tables.vocabulary import Colour

TARGET = "meta"
"""Device for which files are planned. It stands for no particular device, since a file may run on any accelerator."""
LONGEST = 1e6
"""Largest `time_limit` that is accepted, in seconds."""


class Crash(EmitError):
    """Raised if ONNX Runtime, in a separate process, crashes when it loads a rewritten model."""


class Rejected(EmitError):
    """Raised if a rewritten model fails a check. If the source model is faulty itself, `convert.py` raises CaptureError instead."""

    def __init__(self, said: str) -> None:
        super().__init__(f"{said}; please report this model")
        self.said = said


@dataclass(frozen=True)
class OnnxReport:
    """The results of the checks of a rewritten ONNX model, its errors and its size.

    Errors are over all outputs together. They may be large without harm if a mask blocks all positions in a row of attention: the result of
    such a row has no meaning. In fp32 all its positions get equal weights. In fp16 they do not, as the mask is clamped to fp16's range.
    """

    strict_error: float | None = None
    """Relative L2 error of the outputs against fp32, with every low-precision result truly rounded; None if not measured."""
    runtime_error: float | None = None
    """Relative L2 error of the outputs in ONNX Runtime on this machine; None if not measured. Its CPU kernels may hide rounding errors."""
    samples: int = 0
    """Number of sample runs that gave ranges."""
    valid: bool = False
    """Whether the model passed onnx.checker's full check. A note tells if the source fails it, too."""
    weights_before: int = 0
    """Bytes of constants before the rewrite."""
    weights_after: int = 0
    """Bytes of constants after the rewrite."""
    losses: tuple[Loss, ...] = ()
    """Constants that the low format cannot hold to within one rounding."""
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
    """Result of `rewrite_onnx` or `export_onnx`: the rewritten ONNX model, its plan and its report."""

    plan: CastPlan
    report: OnnxReport
    path: Path | None
    """Path of the written model; None if nothing was written."""
    plan_path: Path | None
    """Path of the written plan; None if no plan was written."""
    ir_model: ir.Model = field(repr=False)
    """The model as an onnx_ir model."""

    @property
    def model(self) -> onnx.ModelProto:
        """The model as a ModelProto. A model of more than 2 GB refers to its data file next to `path`."""
        return ir.to_proto(self.ir_model)


@dataclass(frozen=True)
class Order:
    """Options on output files and checks. Raises PolicyError if one is invalid, EmitError if `verify` needs ONNX Runtime and finds none."""

    target: Path | None = None
    plan_target: Path | None = None
    external_data: bool | str = "auto"
    verify: bool = True
    max_rel_err: float | None = None
    time_limit: TimeLimit = "auto"

    def __post_init__(self) -> None:
        flag("verify", self.verify)
        if not is_flag(self.external_data) and not is_word(self.external_data, "auto"):
            raise PolicyError(f"external_data= takes True, False or 'auto', not {shown(self.external_data)}")
        limit = self.max_rel_err
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < float("inf")):
            raise PolicyError(f"max_rel_err= takes a relative error such as 1e-2, not {shown(limit)}")
        seconds = self.time_limit
        if seconds not in (None, "auto") and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST
        ):
            raise PolicyError(f"time_limit= takes seconds up to {LONGEST:g}, None for no limit, or 'auto', not {shown(seconds)}")
        if limit is not None and not self.verify:
            raise PolicyError("max_rel_err= needs verify=True: without it no error is measured")
        if self.verify:
            runtime()
        if self.plan_target is not None and self.target is not None and resolved(self.plan_target) == resolved(self.target):
            raise PolicyError("plan_path= is the path of the model itself; give the plan a file of its own")


class Job:
    """One conversion of an ONNX model from fp32 to mixed precision: call `prepare`, then `run`.

    Before `prepare`, the caller may set `given`, a plan of this ONNX graph, or `torch_plan`, a plan of the PyTorch graph from which the
    model was exported.
    """

    def __init__(
        self, model: ir.Model, policy: Policy, keep_io: bool, notes: Iterable[str] = (), exported: bool = False, name: str = "the model"
    ) -> None:
        self.name = name
        self.policy = replace(policy, keeps_copies=True)  # casts of weights are free: the file stores a weight in the format of its readers
        self.low, self.keep_io = policy.low, keep_io
        self.notes, self.exported = list(notes), exported
        self.before = constant_bytes(model)
        self.model = model
        self.before_raising: list[ir.Model] = []
        """The model before each change of its opset, oldest first, to check that results stayed the same; empty without a change."""
        self.given: ModelPlan | None = None
        self.torch_plan: tuple[ModelPlan, bool] | None = None
        """(plan of the PyTorch graph, whether only its nodes with a node override are carried over); None without such a plan."""
        self.kept_out = frozenset[str]()  # ATen base names of ops that the model runs with torch.autocast disabled
        self.source: Source | None = None
        """The file or object from which the model was read; None for a model from torch's exporter."""
        self.example_inputs = False
        """Whether the samples are the example inputs of the export, not calibration data."""
        self.resized = ""
        """Names of the results whose shape rounding changed on the samples; "" if there are none."""

    def prepare(self) -> None:
        """Prepare the model for passes (for example, raise its opset). Raises PolicyError if a module or node pattern matches nothing."""
        least = 0 if self.exported or not may_quantise(self.policy, self.given) else OPSET
        self.model, notes, self.before_raising = make_ready(self.model, self.low, self.lists, least)
        self.notes += notes
        if not self.exported:
            nodes = [node for graph in self.model.graphs() for node in graph]
            modules, names = {module for node in nodes if (module := provenance(node)[0])}, [node.name or op_of(node) for node in nodes]
            for rules in (self.policy, self.policy.products) if self.policy.products is not None else (self.policy,):
                rules.check("module", modules)
                rules.check("node", names)

    # -- sample and decide ---------------------------------------------------------------------
    def run(self, feeds: Iterable[Feed] | None, order: Order) -> OnnxResult:
        lenient = order.verify or feeds is not None
        samples = self.sample(feeds, order.time_limit, lenient)
        if samples.invalid and lenient:
            unshaped = any(value.shape is None for value in self.model.graph.inputs)
            remedy = f"{', pass calibration= with inputs that fit' * unshaped}, or pass verify=False to have it neither run nor checked"
            self.take_invalid(samples, remedy if feeds is None else "")
        before, notes = self.model.clone() if order.verify else self.model, tuple(self.notes)
        try:
            return self.rewrite(samples, order)
        except Crash:
            if self.given is not None or any(o.pattern == "permute" for o in self.policy.overrides):
                raise
        self.model = before
        self.notes = [*notes, f"Transposes stay fp32: ONNX Runtime's optimiser crashes on some of them in {self.low.name}"]
        self.policy = replace(self.policy, overrides=(*self.policy.overrides, *parse_overrides({"permute": "deny"}, self.low)))
        return self.rewrite(samples, order)

    @property
    def lists(self) -> OpLists:
        """The op lists of the policy, changed by its overrides."""
        return self.policy.op_lists(op_lists(self.policy.lists, self.low, "cuda"))

    def rewrite(self, samples: Samples, order: Order) -> OnnxResult:
        """Decide the plan, edit the model by it, write and check the result. Raises Crash if ONNX Runtime crashes on the result."""
        asked = frozenset(o.pattern for o in self.policy.overrides if o.scope == "op")
        reading = read_onnx(self.model, self.low, self.lists, samples, asked, self.keep_io)
        reading.graph = with_counts(reading, self.model)
        if self.torch_plan is not None:
            self.notes.append(carry_over(self.torch_plan[0], reading, self.torch_plan[1]))
        self.notes += keep_out(self.kept_out, reading)
        products, notes = read_matrix_products(reading, self.model.graph) if may_quantise(self.policy, self.given) else ({}, [])
        self.notes += notes
        region = decide_region(reading, self.policy, self.lists, samples, products, self.given)
        apply_plan(self.model, reading, region, self.low)
        if region.quantised:
            insert_quantised(self.model, reading, region, self.low)
        self.notes += [f"{op} is on no list ({count} nodes): it stays fp32" for op, count in reading.walls.items()]
        for value, count in reading.untyped.items():
            text = f"the type of {printable(value)} is unknown, so its readers stay fp32 ({count} nodes)"
            self.notes.append(f"{text}: declare it in value_info")
        report = OnnxReport(
            samples=samples.seen, weights_before=self.before, weights_after=constant_bytes(self.model), losses=losses(reading, region)
        )
        try:
            return self.emit(region, report, samples, order)
        finally:
            forget_guesses(self.model)

    def sample(self, feeds: Iterable[Feed] | None, limit: TimeLimit, lenient: bool) -> Samples:
        try:
            samples = observe(self.model, feeds, limit, lenient)
        except PolicyError as error:
            if not self.example_inputs:
                raise
            samples = Samples(problem=str(error))  # the inputs ran in PyTorch, so a mismatch with the file is not the user's error
        if samples.problem:
            self.notes.append(f"no sample run, so no ranges are known and range-bound ops stay fp32: {samples.problem}")
        elif samples.made_up:
            self.notes.append("ranges come from a run on made-up inputs; calibration= takes real ones")
        if samples.empty:
            self.notes.append(f"{', '.join(sorted(samples.empty))} held no finite element in a sample, so its readers have no range")
        check_raised(self.name, [*self.before_raising, self.model], samples, limit)
        return samples

    def take_invalid(self, samples: Samples, remedy: str) -> None:
        """Add a note that onnx.checker refuses the source model. Raises CaptureError instead if ONNX Runtime does not run that model
        either. `remedy` is advice that ends the message of the error."""
        if samples.problem:
            why = samples.refusal or samples.problem
            said = f"onnx.checker says {samples.invalid}, and ONNX Runtime does not run it either: {why}"
            raise CaptureError(f"{self.name} is not valid ONNX: {said}; export it again{remedy}")
        self.notes.append(f"onnx.checker refuses {self.name}, and the result with it, but ONNX Runtime runs them: {samples.invalid}")

    # -- write and verify ------------------------------------------------------------------------
    def emit(self, region: RegionPlan, report: OnnxReport, samples: Samples, order: Order) -> OnnxResult:
        if order.target is None and not is_large(self.model):
            if order.verify:
                report = self.verify(None, report, samples, order)
            self.check_accuracy(region, report, order)
            return self.result(region, report)
        with written(self.model, order.target, order.external_data) as made:
            if order.verify:
                report = self.verify(made, report, samples, order)
            self.check_accuracy(region, report, order)
            result = self.result(region, report)
            if order.target is not None:
                made.keep({} if order.plan_target is None else {order.plan_target: result.plan.to_json()})
                if is_large(self.model):  # reload: the weights may refer to a data file that has just been replaced
                    result = replace(result, ir_model=ir.load(order.target))
        return replace(result, path=order.target, plan_path=order.plan_target)

    def result(self, region: RegionPlan, report: OnnxReport) -> OnnxResult:
        """Return the result of the conversion, without paths, because nothing is written yet."""
        plan = CastPlan(self.low.name, (region,), notes=tuple(self.notes), lists=self.policy.lists_name)
        return OnnxResult(plan, replace(report, notes=plan.notes), None, None, self.model)

    def verify(self, made: Written | None, report: OnnxReport, samples: Samples, order: Order) -> OnnxReport:
        """Run onnx.checker's full check, run the model in ONNX Runtime, and measure the error under true rounding.

        `made` is the written model; None if it is in memory only. Return `report` with the results. Raises EmitError for any failure,
        except if onnx.checker has the same complaint about the source model.
        """
        proto, outside = (to_proto(self.model), False) if made is None else (made.proto, made.outside)
        file = str(made.path) if made is not None and outside else None
        complaint = invalid(file or proto)
        if complaint and not same_complaint(complaint, samples.invalid):
            raise Rejected(f"the rewritten model fails onnx.checker: {complaint}")
        strict = None
        try:
            loaded = self._run_here(file or proto, samples, order.time_limit)
            if is_measurable(samples.outputs):
                folder = made.path.parent if made is not None and outside else None
                strict = self._error(samples, strict_outputs(self.model, samples.feeds, proto, folder, order.time_limit))
        except TooSlow as error:
            raise EmitError(f"the rewritten model is too slow to check: {error}, and smaller samples as calibration= take less") from error
        if strict is not None and not math.isfinite(strict):
            self.notes.append(tell_of_overflow(self.name, self.low))
        elif strict is not None and (drawn := drawing_ops(self.model)):
            who = f"the model draws random numbers ({', '.join(drawn)})"
            self.notes.append(f"{who}: the error is that of other draws, not of rounding alone")
        return replace(report, valid=not complaint, runtime_error=loaded, strict_error=strict)

    def check_accuracy(self, region: RegionPlan, report: OnnxReport, order: Order) -> None:
        """Raise AccuracyError if the error exceeds `max_rel_err`. Without a limit, do nothing.

        Raises EmitError if the error of a result is unknown: none was measured, or rounding changed the shape of the result.
        """
        if order.max_rel_err is None:
            return
        error = report.strict_error
        if self.resized:
            raise EmitError(
                f"max_rel_err= cannot be kept: rounding changes the shapes of results ({self.resized}), which depend on values; keep what "
                "decides them fp32 by overrides=, or leave max_rel_err= out"
            )
        if error is None:
            raise EmitError(
                "max_rel_err= cannot be kept: the model did not run on samples, or gave no finite floating number on them; pass "
                "calibration= on which it does"
            )
        if not error <= order.max_rel_err:
            found = f"the relative L2 error under strict rounding is {error:.3g}, more than {order.max_rel_err:g}"
            raise AccuracyError(f"{found}; nothing was written", self.result(region, report))

    def _run_here(self, made: str | onnx.ModelProto, samples: Samples, limit: TimeLimit) -> float | None:
        seconds = seconds_for(weight_bytes(self.model), limit)
        if self.low.ort_cpu and may_crash(self.model):
            tried = trial.failure(made if isinstance(made, str) else made.SerializeToString(), [], providers(), seconds)
            if tried.startswith(trial.ENDS):
                raise Crash(
                    f"ONNX Runtime crashes when it loads the rewritten model: {tried}. Its optimiser is known to do so on Transposes in "
                    f"{self.low.name} before matrix products; keep them in fp32, by the plan or by overrides={{'permute': 'deny'}}"
                )
        try:
            runner = session(made)
        except Exception as error:
            if not self.low.ort_cpu:
                self.notes.append(f"ONNX Runtime has no {self.low.name} kernels for it here; checked, and run under strict rounding only")
                return None
            if samples.problem:
                self.notes.append(f"ONNX Runtime loads neither the fp32 model nor this one: {one_line(error)}")
                return None
            runner = self._unoptimised(made, error)
        if not samples.feeds:
            return None
        border = {format_of(value) for value in (*self.model.graph.inputs, *self.model.graph.outputs)}
        if any(not row.ort_cpu and row.name in border for row in FORMATS.values()):
            self.notes.append(f"ONNX Runtime takes and gives no {self.low.name} here; checked, loaded, and run under strict rounding only")
            return None
        kinds = {str(v.name): v.dtype.numpy() for v in self.model.graph.inputs if isinstance(v.type, ir.TensorType) and v.dtype}
        feeds = [{n: np.asarray(given, kinds[n]) if n in kinds else given for n, given in feed.items()} for feed in samples.feeds]
        try:
            found = [run_within(runner, None, feed, seconds) for feed in feeds]
            return self._error(samples, found)
        except TooSlow:
            raise
        except Exception as error:
            raise Rejected(f"ONNX Runtime fails on the rewritten model: {one_line(error)}") from error

    def _error(self, samples: Samples, found: Sequence[Sequence[Any]]) -> float | None:
        """Return the relative error of the results `found` on the samples; None if there is no finite floating number to compare.

        Results of another shape than in fp32 are left out. Their names are stored in `self.resized`, and a note lists them.
        """
        other = resized(samples.outputs, found)
        if other:
            self.resized = ", ".join(str(output.name) for place, output in enumerate(self.model.graph.outputs) if place in other)
            note = f"on the samples, rounding changes the shapes of results ({self.resized}), which depend on values; "
            if not any(each.startswith(note) for each in self.notes):
                self.notes.append(f"{note}their error is not measured")
        runs = samples.outputs, found
        wanted, got = ([[each for place, each in enumerate(run) if place not in other] for run in each] for each in runs)
        return relative_error(wanted, got) if is_measurable(wanted) else None

    def _refused_itself(self) -> str:
        """Load the source model in ONNX Runtime with default options. Return the error as text; "" if there is no error, or no source."""
        source = self.source
        if source is None:
            return ""
        try:
            found = to_proto(source) if isinstance(source, ir.Model) else source
            session(found if isinstance(found, onnx.ModelProto) else str(found))
        except Exception as error:
            return one_line(error)
        return ""

    def _unoptimised(self, made: str | onnx.ModelProto, error: Exception) -> Any:
        """Return a session of `made` that runs without ONNX Runtime's optimiser, because the optimiser fails on the source model, too.

        `made` is the rewritten model or the path of its file. `error` is the error of loading it with the optimiser. Adds a note.
        Raises Rejected if the source loads with the optimiser, or if `made` fails without the optimiser, too.
        """
        said = self._refused_itself()
        if not said:
            raise Rejected(f"ONNX Runtime refuses the rewritten model: {one_line(error)}") from error
        try:
            runner = session(made, level=0)
        except Exception as plainly:
            raise Rejected(f"ONNX Runtime refuses the rewritten model, optimised or not: {one_line(plainly)}") from plainly
        self.notes.append(
            f"ONNX Runtime's optimiser fails on {self.name}, too ({said}), so this model was run without it; run both with "
            "graph_optimization_level = ORT_DISABLE_ALL"
        )
        return runner

    def unchanged(self, order: Order) -> OnnxResult:
        """Write and check the model without changes, for a policy whose low format is fp32, and return the result."""
        report = OnnxReport(weights_before=self.before, weights_after=self.before)
        return self.emit(RegionPlan(REGION, (), ()), report, Samples(), order)


def fp8_products(products: Any, policy: Policy, calibrated: bool) -> ProductPolicy | None:
    """Parse the option `products=` for a rewritten file whose low format is that of `policy`. Return None for None.

    `calibrated` is True if the caller gave samples, which give the scales. Raises PolicyError if there are no samples, if the low format is
    fp32, or if `products` chooses by cost, as "fp8" does, and `policy.device` is "" or has no fp8 units.
    """
    # fused=True, because the runtime that runs the file fuses casts, as a graph compiler does
    checked = parse_products(products, fused=True, low=policy.low)
    if checked is None:
        return None
    if policy.low is FP32:
        raise PolicyError("products= needs a low format, fp16 or bf16: fp8 copies are made of low values")
    if not calibrated:
        raise PolicyError("products= needs calibration=: an fp8 copy has a constant scale in a file, which comes from samples")
    if checked.preset.priced and not (policy.device and named_device(policy.device).fp8):
        fast = ", ".join(name for name, row in NAMED.items() if row.fp8)
        raise PolicyError(
            f"products={checked.name!r} decides by the prices of a device with fp8 units: name it with device= ({fast}), or take 'fp8-all'"
        )
    return checked


def decide_region(
    reading: OnnxReading, policy: Policy, lists: OpLists, samples: Samples, products: Mapping[str, MatrixProduct], given: ModelPlan | None
) -> RegionPlan:
    """Return the plan that the deciding passes make for a graph; nothing is edited. Raises PlanError if the plan `given` does not fit."""
    seen = RegionRanges(fingerprint(reading.graph), REGION, reading.ranges)
    problem = Problem(
        graph=reading.graph, policy=policy, lists=lists, name=REGION, device=TARGET, constants=tuple(reading.constants),
        calibration=Calibration("", "", samples.seen, (seen,)),
        offsets=read_offsets(reading), summands=read_summands(reading), repeated=read_repeated(reading),
        matrix_products=products,
    )  # fmt: skip
    if given is not None:
        problem = replace(problem, given=given_region(given, problem))
    region = plan_region(problem)
    # use one scale per tensor: a file stores scales as constants, but scales of rows would depend on the input
    copies = tuple(replace(copy, scales=TENSOR) for copy in region.quantised.copies)
    return replace(region, quantised=replace(region.quantised, copies=copies))


def losses(reading: OnnxReading, region: RegionPlan) -> tuple[Loss, ...]:
    """Return a `Loss` for each constant that is more than rounded, unless the passes found this harmless. `kept`: a reader stays fp32."""
    colours, found = {node.name: node.colour for node in region.nodes}, dict[str, Loss]()
    for read in reading.constants:
        kept = colours[read.follows] is Colour.HIGH
        # `read.loss.kept` is True if the constant's error is a reason to run the op that reads it in fp32. If the passes let this op run
        # low all the same, they found the error harmless, so do not report it
        if read.loss is not None and (kept or not read.loss.kept):
            found[read.loss.name] = replace(read.loss, kept=kept or (read.loss.name in found and found[read.loss.name].kept))
    return tuple((found | reading.kept).values())


def constant_bytes(model: ir.Model) -> int:
    """Return the size in bytes of all initialisers and Constant nodes together."""
    held = (constant_tensor(node.outputs[0]) for graph in model.graphs() for node in graph if node.op_type == "Constant")
    return weight_bytes(model) + sum(tensor.nbytes for tensor in held if tensor is not None)
