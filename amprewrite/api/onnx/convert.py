"""The public functions on ONNX: `rewrite_onnx` for fp32 files from any source, and `export_onnx` for rewritten PyTorch models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from amprewrite.api.onnx.job import Job, OnnxReport, OnnxResult, Order, Rejected, fp8_products
from amprewrite.api.onnx.plans import REGION
from amprewrite.graphs.onnx.check import invalid
from amprewrite.graphs.onnx.ops import names_of
from amprewrite.graphs.onnx.read.load import Source, load, name_of
from amprewrite.graphs.onnx.run.onnx_runtime import TimeLimit, runtime
from amprewrite.graphs.onnx.run.samples import CallersError, read_feeds
from amprewrite.ir.policies.policy import Policy, parse_overrides
from amprewrite.report.cast_plan import CastPlan
from amprewrite.tables.boundary.arguments import flag
from amprewrite.tables.boundary.files import resolved
from amprewrite.tables.errors import AmpRewriteError, CaptureError, PassError, PlanError, PolicyError, one_line
from amprewrite.tables.formats import DEFAULT_ONNX, FP32, WIDE, parse_format
from amprewrite.tables.ops.op_lists import OpLists, find_op


def rewrite_onnx(
    model: Source,
    out: str | Path | None = None,
    *,
    dtype: Any = None,
    lists: str | OpLists = "default",
    overrides: Mapping[str, str] | None = None,
    products: Any = None,
    device: str | None = None,
    plan: CastPlan | None = None,
    calibration: Any = None,
    keep_io: bool = True,
    external_data: bool | str = "auto",
    plan_path: str | Path | None = None,
    verify: bool = True,
    max_rel_err: float | None = None,
    time_limit: TimeLimit = "auto",
) -> OnnxResult:
    """Rewrite an fp32 ONNX model to mixed precision with the passes and lists of `rewrite`, and return model, plan and report.

    Args:
        model: a path, a ModelProto or an onnx_ir model. It does not change.
        out: the path to write; None writes nothing. An existing file is replaced only if the result passed all checks.
        dtype: "fp16" or "bf16". None means the format of `plan` if given, otherwise "fp16".
        lists: as for `rewrite`.
        overrides: as for `rewrite`. Op names may be ONNX names ("Softmax"). Module paths are as torch's exporter recorded them.
        products: as for `rewrite`: which matrix products with a constant matrix read fp8 copies of their operands, in fp16 and bf16 files.
            Needs `calibration`, which gives the scales, and opset 21, to which the file is raised.
        device: name of the device for which `products` is decided, such as "h100". The presets choose the matrix products that are faster
            in fp8 according to the cost table of this device. Only "fp8-all" needs no device.
        plan: a plan of this model, edited or not. The conversion follows this plan instead of deciding by itself.
        calibration: a sample, or an iterable of samples, which are read one at a time. A sample is a mapping of input names to arrays, or
            the path of an .npz file. Runs on the samples give the ranges of values, which decide what fits the low format. The first
            eight runs also measure the error. None uses made-up inputs.
        keep_io: whether inputs and outputs stay fp32.
        external_data: whether to write weights into a separate file next to `out`. "auto" does so if they do not fit one protobuf (2 GB).
        plan_path: a path to write the plan to as JSON.
        verify: whether to run onnx.checker's full check, to run the result in ONNX Runtime, and to measure the error under true rounding:
            in a run that computes in fp32 and rounds each low result. Kernels may keep more digits.
        max_rel_err: largest relative L2 error of the outputs under true rounding. A larger error raises AccuracyError, and nothing is
            written.
        time_limit: limit in seconds for one sample run; a run under true rounding may take four times as long. None sets no limit.
            "auto" is 5 seconds, and one more for every 20 MB of weights.

    Raises:
        CaptureError: `model` is no ONNX model, or cannot be read.
        PolicyError: invalid options.
        PlanError: `plan` does not fit the model.
        EmitError: the result cannot be written or fails a check. AccuracyError is a subclass.
    """
    if plan is not None and not isinstance(plan, CastPlan):
        raise PolicyError(f"plan= takes a CastPlan (CastPlan.from_json reads one), not {type(plan).__name__}")
    low = parse_format(dtype if dtype is not None else plan.low if plan is not None else DEFAULT_ONNX)
    if low is FP32:
        raise PolicyError("dtype='fp32' leaves nothing to rewrite; use 'fp16' or 'bf16'")
    policy = Policy(low, lists, parse_overrides(_onnx_names(overrides or {}), low), device=device or "")
    policy = replace(policy, products=fp8_products(products, policy, calibrated=calibration is not None))
    if any(override.word == WIDE for override in policy.overrides):
        raise PolicyError("overrides= asks for wide products, and no op of ONNX multiplies bf16 and returns fp32; use 'fp32' instead")
    order, keep_io = _order(out, plan_path, external_data, verify, max_rel_err, time_limit), flag("keep_io", keep_io)
    if device is not None and products is None:
        raise PolicyError("device= gives prices to products= alone, which is not given: a file is for no device in particular")
    if plan is not None and (overrides or products):
        raise PolicyError("plan= chooses formats, as overrides= and products= do; put the overrides into the plan with plan.edit")
    if calibration is not None:
        runtime()
    with _blamed(model):
        job = Job(load(model), policy, keep_io, name=name_of(model))
        job.given, job.source = plan, model
        job.prepare()
        return job.run(None if calibration is None else read_feeds(job.model, calibration), order)


def export_onnx(
    amp: Any,
    path: str | Path,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    opset: int | None = None,
    dynamic_shapes: Any = None,
    products: Any = None,
    keep_io: bool = True,
    external_data: bool | str = "auto",
    plan: CastPlan | None = None,
    plan_path: str | Path | None = None,
    calibration: Any = None,
    verify: bool = True,
    max_rel_err: float | None = None,
    time_limit: TimeLimit = "auto",
) -> OnnxResult:
    """Write the rewritten model `amp` to `path` as an ONNX file, and return model, plan and report.

    torch.onnx.export exports the plain fp32 clone, and the passes rewrite the file. The dtype, lists and overrides given to `rewrite`
    apply. `node:` overrides and plans given to `rewrite` name nodes of the PyTorch graph; these are matched with nodes of the file by
    module and op. The override "wide" means fp32 here. The file has no loss scaling and no padding.

    Args:
        args: positional example inputs. Without `calibration`, they are also the sample that gives ranges and errors.
        kwargs: example inputs by keyword.
        opset: the opset version for torch.onnx.export. None takes its default, or 21 if the file has fp8 products.
        dynamic_shapes: passed to torch.onnx.export.
        products: as for `rewrite_onnx`, but rules by node are ignored. None takes the option given to `rewrite`.
        plan: a plan, edited or not, from an earlier export or of the PyTorch graph. The file follows this plan.
        calibration: as for `rewrite_onnx`. It also gives the scales of fp8 copies. Without it, fp8 products of `amp` are bf16 in the file.

    The other arguments are the same as for `rewrite_onnx`.

    Raises:
        CaptureError: torch.onnx.export cannot export the model, or its file does not compute the same in fp32.
        PlanError: `plan` does not fit the model.
        PolicyError: as for `rewrite_onnx`.
        EmitError: as for `rewrite_onnx`.
    """
    from amprewrite.api.onnx.export import exported, kept_out, torch_plan

    if plan is not None and not isinstance(plan, CastPlan):
        raise PolicyError(f"plan= takes a CastPlan (CastPlan.from_json reads one), not {type(plan).__name__}")
    order, keep_io = _order(path, plan_path, external_data, verify, max_rel_err, time_limit), flag("keep_io", keep_io)
    model, feed, policy, notes = exported(amp, args, kwargs, opset, dynamic_shapes, products, calibrated=calibration is not None)
    job = Job(model, policy, keep_io, notes, exported=True)
    if plan is not None and plan.low != policy.low.name:
        raise PlanError(f"the plan is for low = {plan.low}, this model's is {policy.low.name}; rewrite it with dtype={plan.low!r}")
    if policy.low is FP32:
        return job.unchanged(order)
    if plan is not None and any(region.name == REGION for region in plan.regions):
        job.given = plan
    else:
        job.torch_plan = torch_plan(amp, args, kwargs, plan)
        job.kept_out = kept_out(amp, args, kwargs, model)
    with _blamed(model):
        job.prepare()
        if calibration is not None:
            return job.run(read_feeds(job.model, calibration), order)
        job.example_inputs = True
        return job.run((feed,) if feed else None, order)


@contextlib.contextmanager
def _blamed(source: Source) -> Iterator[None]:
    """Context manager that turns errors of libraries into CaptureError if `source` is faulty or too large, otherwise into PassError."""
    try:
        yield
    except Rejected as error:
        problem = _source_problem(source)
        if problem:
            raise CaptureError(f"{name_of(source)} is not valid ONNX: {problem}, and {error.said}; export it again") from error
        raise
    except AmpRewriteError:
        raise
    except CallersError as error:
        raise error.original from None
    except Exception as error:
        name, said = name_of(source), f"{type(error).__name__}: {one_line(error)}"
        problem = _source_problem(source)
        if problem:
            raise CaptureError(f"{name} is not valid ONNX: {problem}; export it again") from error
        if isinstance(error, MemoryError):
            raise CaptureError(f"{name} takes more memory than there is ({said})") from error
        raise PassError(f"{name} cannot be rewritten ({said}); please report this model") from error


def _source_problem(source: Source) -> str:
    """Return why `source` is faulty: an error from reading it, from writing it again or from onnx.checker; "" if there is no error."""
    try:
        model = load(source)
        if any(isinstance(word, bytes) for graph in model.graphs() for node in graph for word in (node.name, node.op_type, node.domain)):
            return "a name in it is no UTF-8 text"
        found = ir.to_proto(model)
    except Exception as error:
        return one_line(error)
    return invalid(found if isinstance(source, ir.Model) else source)


def _order(out: Any, plan_path: Any, external_data: bool | str, verify: bool, max_rel_err: float | None, time_limit: TimeLimit) -> Order:
    if plan_path is not None and out is None:
        raise PolicyError("plan_path= goes with a file that is written: give out=, or save result.plan.to_json() yourself")
    return Order(_target(out), _target(plan_path), external_data, verify, max_rel_err, time_limit)


def _target(out: Any) -> Path | None:
    if out is None:
        return None
    resolved(out)  # check the path before the long conversion: `resolved` raises an error if no file can be written there
    return Path(out).absolute()


def _onnx_names(overrides: Mapping[str, str]) -> dict[str, str]:
    """Return the overrides with each ONNX op name replaced by all names that its nodes may have in our op table.

    For example, "Pow" stands for "pow", "sqrt" and others, because a Pow node may be a square root. If "Pow" and "Sqrt" are both given,
    "sqrt" gets the format of "Sqrt", which stands for fewer names.
    """
    if not isinstance(overrides, Mapping):
        raise PolicyError(f"overrides= takes a dict such as {{'Softmax': 'deny'}}, not {type(overrides).__name__}")
    names = {key: (names_of(key) if find_op(key) is None else None) or {key} for key in overrides}
    return {name: overrides[key] for key in sorted(names, key=lambda key: -len(names[key])) for name in sorted(names[key])}


__all__ = ["OnnxReport", "OnnxResult", "export_onnx", "rewrite_onnx"]
