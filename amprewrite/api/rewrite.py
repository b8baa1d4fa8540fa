"""The public functions: rewrite a model, or just plan it.

What needs Dynamo is imported by the first call: importing these functions alone is cheap.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from amprewrite.ir.evidence.ranges import Calibration
from amprewrite.ir.policies.pad_policy import parse_pad
from amprewrite.ir.policies.policy import Policy, parse_overrides
from amprewrite.ir.policies.product_policy import ProductPolicy, parse_products
from amprewrite.report.cast_plan import CastPlan
from amprewrite.runtime.model.parts import MODEL, parse_granularity
from amprewrite.runtime.model.weights.half_parameters import half_put_back, refuse_trainable
from amprewrite.runtime.model.weights.half_parameters import upcast as to_fp32
from amprewrite.runtime.options import Options
from amprewrite.runtime.training.loss_scale import parse_loss_scale
from amprewrite.runtime.training.optimizers.find_optimizers import optimizer_inside
from amprewrite.tables.boundary.arguments import flag, is_flag, is_word, keywords, shown
from amprewrite.tables.boundary.members import named_parameters_in
from amprewrite.tables.devices import named_device
from amprewrite.tables.errors import OpListError, PlanError, PolicyError
from amprewrite.tables.extras import load_extra
from amprewrite.tables.formats import FP32, LOW_FORMATS, Format, parse_format
from amprewrite.tables.ops.op_lists import PRESETS, OpLists, op_lists
from amprewrite.tables.recipes import BASE

M = TypeVar("M")
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


def rewrite(
    model: M,
    *,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    optimizer: Optimizers = None,
    dtype: str | torch.dtype | Format | None = None,
    lists: str | OpLists = "default",
    overrides: Mapping[str, str] | None = None,
    plan: CastPlan | None = None,
    calibration: Calibration | Iterable[Any] | None = None,
    tolerance: float | None = None,
    accuracy: str | None = None,
    metric: Any = None,
    device: str | None = None,
    measure: bool = False,
    memory: float = 0.0,
    parity: str | float = "train",
    high: str = "fp32",
    loss_scale: Any = "auto",
    pad: Any = "auto",
    products: Any = None,
    granularity: str | Iterable[str] = MODEL,
    backend: str | Callable[..., Any] = "eager",
    cache_weights: bool | str = True,
    strict: bool = False,
    inplace: bool = False,
    upcast: bool = False,
) -> M:
    """A mixed-precision clone of `model`: same class, same Parameters and buffers, fp32 in and out.

    Nothing is captured until the first call, which captures with the real inputs; `example_inputs` (and `example_kwargs`)
    capture at once, so that `amp.plan` is there. The original is left as it is.

    Args:
        model: an nn.Module (a GraphModule too), or a torch.export.ExportedProgram.
        optimizer: one optimizer or several that step this model's parameters: a step whose gradients overflowed is skipped.
            Those not named here are found at their first step.
        dtype: "bf16", "fp16" or a torch dtype: done as asked. None: what the device does best, which may be nothing.
        lists: "default", "tf", "autocast", "o2", "o3", or an OpLists value.
        overrides: `{"softmax": "deny", "module:encoder.layer.0.*": "fp32", "node:linear_3": "low"}`.
        plan: follow this plan, perhaps edited, instead of deciding; one that does not fit raises PlanError.
        calibration: what `amprewrite.calibrate` gave, or batches to calibrate with: in fp16, values that would overflow or
            be flushed stay fp32, with the evidence in the plan. Batches run in the model's present mode.
        tolerance: relative L2 error of the outputs that may be spent; the cheapest plan found within it is taken.
        accuracy: "autocast": the cheapest plan found whose error is not above that of torch.autocast's rules. Both measure on
            the calibration batches, or on `example_inputs`; `amprewrite.accuracy.frontier.search` has the details and the frontier.
        metric: what `tolerance` and `accuracy` measure: None or "l2", the relative L2 error of all outputs; "logprob", the mean
            Kullback-Leibler divergence in nats of the next token's probabilities (the softmax of the logits) from those of fp32; or a
            function of (fp32 output, output) that gives a number.
        device: plan for this device ("h100", "a100", "cpu", …; `amprewrite.tables.devices.NAMED` has them all) instead of the one at
            hand: its prices, and with dtype=None its best format. Which kernels exist is asked of where the model runs.
        memory: seconds that a gigabyte of activations kept for backward is worth to the plan, such as 0.01; 0 plans for speed.
        parity: one plan for all graphs of the model, so that training, evaluation, inference and exports compute the same numbers.
            "train" or "eval" say whose cost counts, a number between 0 and 1 how much a step of training counts beside a pass
            without gradients. An op has one colour in all graphs, whatever their sizes: the graph that is captured first decides,
            and an op that a later graph must keep high is high in all from then on. False: each graph gets the plan that is
            cheapest for it, and numbers differ by the rounding.
        measure: time ops and casts on the device at hand instead of taking prices from the table; kept on disk.
        high: "fp32". TF32 is no choice: PyTorch has one switch for the whole process, which kernels read as they start, so
            no region of a graph can have its own without changing it for everybody and breaking torch.compile's guards.
            Where it is set (`torch.set_float32_matmul_precision("high")`), ops that stay high use it and are priced so.
        loss_scale: "auto" (dynamic for fp16, none for bf16), "dynamic", the name of a preset, a number that stays, None, or
            a LossScale, which several models may share. It is built into the training graphs: gradients arrive unscaled.
        granularity: "model" captures as much as it can at once. "blocks" captures each repeated block by itself, as FSDP2
            block by block needs it; a list of module paths (shell patterns) names the blocks. One loss scale serves all.
        pad: round dims of low matrix products up to what Tensor Cores want: "auto" where the device's cost table says it pays,
            "always", "never", "measure" (times the products on the GPU), a multiple, or `{"module:encoder.*": …}`. Parameters,
            gradients, state_dict and results keep their sizes.
        products: let bf16 products of rows and a matrix (linear, addmm, mm, matmul of a matrix) read fp8 copies of their operands where it
            pays: "fp8" (a scale a tensor; gradients of weights by price, too), "fp8-safe" (a scale a row; gradients of weights stay in
            bf16), "fp8-rowwise", or "fp8-all" (whatever the kernels take at any price, for tests). A mapping has rules as well:
            `{"preset": "fp8-safe", "module:head": "bf16", "node:linear_3.grad_weight": "bf16", "module:blocks.*": "fp8"}`. Needs
            dtype="bf16". A device without fp8 units computes the same numbers by emulation, where a rule or "fp8-all" asks for it.
        backend: any torch.compile backend, by name or as a callable, for the rewritten graphs. "inductor" keeps fp32 inside its
            kernels, so its numbers differ from those of "eager" by the rounding; "inductor-exact" fuses less and gives the same numbers.
        cache_weights: True: eager graphs on a GPU cast many weights in one launch, and in training few launches bring their
            gradients back; a compiler and a CPU cast each weight where it is read. Copies serve one call alone, so no write is
            missed. `amp.frozen_weights()` keeps those of calls without gradients for a block, and `generate()` for itself.
            "step": copies are kept until any optimizer steps, the mode changes or weights are loaded, in eager training too, so
            gradient accumulation casts nothing twice; copies of weights that take no gradient outlive the step. Call
            `amp.weights_changed()` after writes that PyTorch does not count (`.data`, NumPy, DLPack, collectives): most are found
            at a later call, with a warning, but not all. False: every weight is cast where it is read, everywhere.
        strict: whatever cannot be captured raises CaptureError instead of running in fp32 with a warning.
        inplace: turn `model` itself into the rewritten model and return it, for code that goes on with the object it has, as
            many trainers do. `amprewrite.restore(model)` undoes it. If anything raises, the model is as it was.
        upcast: make fp32 master weights of parameters that are bf16 or fp16 and take gradients, in place, as a checkpoint that was
            loaded in half precision needs it; the original, whose parameters they are, is fp32 then, too. `amp.plan` says how many.
            Frozen ones stay half. False: such a model is a PolicyError.

    Raises:
        PolicyError: options that make no sense.
        CaptureError: a model that cannot be captured, or with `strict=True` is another one when it is.
        PlanError: a plan that does not fit.
        CalibrationError: batches that cannot be run, ranges of another model.
        AccuracyError: an accuracy that cannot be reached.
    """
    from amprewrite.api.module import Rewritten
    from amprewrite.runtime.compiler.dynamo import refuse_ambient_autocast
    from amprewrite.runtime.model.rewritten import is_rewritten, module_of, plain_of, put_back_on_error, wrap, wrap_in_place
    from amprewrite.runtime.model.weights.freezing import refuse_frozen

    if flag("inplace", inplace) and isinstance(model, torch.export.ExportedProgram):
        raise PolicyError("inplace=True turns a module into its rewrite, and an ExportedProgram is none; use amp = rewrite(program)")
    if flag("upcast", upcast) and isinstance(model, torch.export.ExportedProgram):
        raise PolicyError("upcast=True converts the parameters of a module, and an ExportedProgram has its dtypes in its graph")
    module = module_of(model)
    if not isinstance(example_inputs, tuple | list | None):
        raise PolicyError(f"example_inputs= takes the tuple of positional arguments, not {type(example_inputs).__name__}")
    example_kwargs = None if example_kwargs is None else keywords("example_kwargs", example_kwargs)
    if not upcast:
        refuse_trainable(named_parameters_in(module))
    options = checked_options(
        dtype=dtype, lists=lists, overrides=overrides, plan=plan, backend=backend, cache_weights=cache_weights, strict=strict,
        device=device, measure=measure, memory=memory, high=high, loss_scale=loss_scale, pad=pad, parity=parity,
        products=products,
    )  # fmt: skip
    options = replace(options, granularity=parse_granularity(granularity, module))
    check_patterns(options, module)
    refuse_ambient_autocast()
    refuse_frozen(module, "rewriting it")
    target = tolerance, accuracy, metric
    calls = None if example_inputs is None and example_kwargs is None else (tuple(example_inputs or ()), example_kwargs or {})
    with half_put_back(module):
        note = to_fp32(module) if upcast else ""
        plain = plain_of(module) if is_rewritten(module) else module
        options = replace(options, **measured_options(plain, options, calibration, target, example_inputs, example_kwargs))
        if not inplace:
            return _ready(wrap(plain, options, Rewritten), optimizer, calls, note)  # type: ignore[no-any-return]
        with put_back_on_error(module):
            return _ready(wrap_in_place(module, options, Rewritten), optimizer, calls, note)  # type: ignore[no-any-return]


def _ready(amp: Any, optimizer: Optimizers, example: tuple[tuple[Any, ...], Mapping[str, Any]] | None, note: str) -> Any:
    """`amp` with its optimizers attached, and captured if there are example inputs. If that raises, no optimizer is guarded."""
    from amprewrite.runtime.model.rewritten import capture_now, session_of

    if note:
        session_of(amp).note(note)
    try:
        for each in optimizers_of(optimizer):
            amp.attach(each)
        if example is not None:
            capture_now(amp, *example)
    except BaseException:
        session_of(amp).gate.retire()
        raise
    return amp


def restore(model: M) -> M:
    """Turn a rewritten model back into the plain fp32 model it was, in place, and return it.

    Parameters, buffers, hooks and what `.compile()` made before `rewrite(model, inplace=True)` are as they were. Its optimizers are
    no longer guarded. PlanError if the model was never rewritten; CaptureError if it went through fully_shard since.
    """
    from amprewrite.runtime.model.rewritten import unwrap_in_place

    if not isinstance(model, nn.Module):
        raise PolicyError(f"restore takes a rewritten nn.Module, not {type(model).__name__}")
    unwrap_in_place(model)
    return model


def measured_options(
    module: nn.Module,
    options: Options,
    calibration: Calibration | Iterable[Any] | None,
    target: tuple[float | None, str | None, Any],
    args: tuple[Any, ...] | None,
    kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Run the model on sample batches for the options `calibration` and `keep_high`. `target` is (tolerance, accuracy, metric)."""
    if calibration is None and all(each is None for each in target):
        return {}
    from amprewrite.accuracy.calibrate import calibrate
    from amprewrite.accuracy.strict.metric import parse_metric
    from amprewrite.accuracy.trial import CallArguments, tee

    found: dict[str, Any] = {}
    batches: list[Any] = [] if args is None and kwargs is None else [CallArguments(tuple(args or ()), dict(kwargs or {}))]
    if isinstance(calibration, Calibration):
        found["calibration"] = calibration
    elif calibration is not None:
        batches = []
        found["calibration"] = calibrate(module, tee(calibration, batches), progress=False)
    if calibration is not None:
        found["calibration"].check(module)
    tolerance, accuracy, metric = target
    parsed = parse_metric(metric)
    if metric is not None and tolerance is None and accuracy is None:
        raise PolicyError("metric= says what tolerance= and accuracy= measure, and neither is given: pass one of them, or leave it out")
    if tolerance is not None or accuracy is not None:
        frontier = load_extra("accuracy search", "tolerance=" if accuracy is None else "accuracy=")
        frontier.check_target(tolerance, accuracy, parsed)
        if options.given is not None:
            raise PolicyError("plan= says what runs in what: it leaves nothing for tolerance= or accuracy= to choose")
        found["keep_high"] = frontier.search(module, batches, replace(options, **found), tolerance, accuracy, metric=metric).keep_high
    return found


def plan(model: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> CastPlan:
    """The plan that `rewrite(model, **options)` would run for these inputs, without rewriting anything.

    Args:
        args: the positional arguments of one call, as a tuple. Their shapes, dtypes and devices count, and whether gradients are on.
        kwargs: its keyword arguments.
        options: those of `rewrite`; after `upcast=True` the parameters are half again.

    Raises what `rewrite` raises.
    """
    with half_put_back(model, always=True) if isinstance(model, nn.Module) else contextlib.nullcontext():
        amp = rewrite(model, example_inputs=args, example_kwargs=kwargs, **options)
        found: CastPlan = amp.plan
        return found


def checked_options(
    *,
    dtype: str | torch.dtype | Format | None = None,
    lists: str | OpLists = "default",
    overrides: Mapping[str, str] | None = None,
    plan: CastPlan | None = None,
    backend: str | Callable[..., Any] = "eager",
    cache_weights: bool | str = True,
    strict: bool = False,
    device: str | None = None,
    measure: bool = False,
    memory: float = 0.0,
    high: str = "fp32",
    loss_scale: Any = "auto",
    pad: Any = "auto",
    parity: str | float = "train",
    products: Any = None,
) -> Options:
    """The options of `rewrite` that can be checked without a model; raises as `rewrite` does."""
    if not is_flag(cache_weights) and not is_word(cache_weights, "step"):
        raise PolicyError(f"cache_weights={shown(cache_weights)} is not understood: use True, False or 'step'")
    if plan is not None and not isinstance(plan, CastPlan):
        raise PolicyError(f"plan= takes a CastPlan (CastPlan.from_json reads one), not {type(plan).__name__}")
    if plan is not None:
        dtype = plan.low if dtype is None else dtype
        lists = plan.lists if is_word(lists, "default") and plan.lists in PRESETS else lists  # they decide what is one op
    cache_weights = cache_weights if isinstance(cache_weights, str) else bool(cache_weights)
    strict = flag("strict", strict)
    low = None if dtype is None else parse_format(dtype)
    if plan is not None and low is not None and plan.regions and plan.low != low.name:
        raise PlanError(f"the plan is for low = {plan.low}, dtype= asks for {low.name}; leave dtype= out, or make a plan for {low.name}")
    checked = parse_overrides({} if overrides is None else overrides, low or LOW_FORMATS[1])
    if not isinstance(lists, str | OpLists):
        raise OpListError(f"lists={shown(lists)} is no preset; use the name of one, or an OpLists value")
    op_lists(lists, low or LOW_FORMATS[1], "cpu")
    _check_backend(backend)
    if low is FP32 and plan is None:
        lists = op_lists("default", LOW_FORMATS[1], "cpu")
    _check_high(high)
    return Options(
        low, lists, checked, backend, cache_weights, strict, plan,
        loss_scale=_checked_scale(loss_scale, low),
        device=_checked_device(device, flag("measure", measure)),
        measure=bool(measure),
        memory=_checked_memory(memory),
        pad=parse_pad(pad, torch.cuda.is_available()),
        parity=_checked_parity(parity),
        products=_checked_products(products, low, plan, backend),
    )  # fmt: skip


def check_patterns(options: Options, module: nn.Module) -> None:
    """Raise PolicyError if a pattern of the options matches no module of the model."""
    paths = [path for path, _ in module.named_modules()]
    Policy(options.low or LOW_FORMATS[1], overrides=options.overrides).check_modules(paths)
    options.pad.check_modules(paths)
    if options.products is not None:
        options.products.check_modules(paths)


def _check_backend(backend: Any) -> None:
    if not (isinstance(backend, str) or callable(backend)):
        raise PolicyError(f"backend= takes the name of a torch.compile backend or a callable, not {type(backend).__name__}")
    if not is_word(backend, "eager"):
        from amprewrite.runtime.compiler.dynamo import EXACT, lookup_backend

        try:
            lookup_backend(backend)
        except PolicyError:
            raise
        except Exception as error:
            known = ", ".join((EXACT, *torch.compiler.list_backends()))
            raise PolicyError(f"backend={shown(backend)} is no torch.compile backend; there are eager, {known}") from error


def _checked_scale(loss_scale: Any, low: Format | None) -> Any:
    """`loss_scale` as `parse_loss_scale` takes it; PolicyError if it does not."""
    if loss_scale is None:
        loss_scale = "none"
    parse_loss_scale(loss_scale, low or FP32)
    return loss_scale


def _checked_device(device: Any, measure: bool) -> str:
    """The name of the device to plan for, "" for the one at hand."""
    if device is None:
        return ""
    if measure:
        raise PolicyError(f"measure=True times the device at hand, device={shown(device)} plans for another: choose one")
    named_device(device)
    return str(device)


def _checked_memory(memory: Any) -> float:
    """`memory` in seconds a byte; PolicyError if it is no price a gigabyte."""
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 <= memory < math.inf:
        raise PolicyError(f"memory={shown(memory)} is no price; give the seconds that a gigabyte kept for backward is worth, or 0")
    return memory / 1e9


def _checked_parity(parity: Any) -> float | None:
    """How much a step of training counts in the prices of all graphs; None if each graph has its own."""
    words = {"train": 1.0, "eval": 0.0}
    if isinstance(parity, str) and parity in words:
        return words[parity]
    if is_flag(parity):
        return words["train"] if parity else None
    if not isinstance(parity, int | float) or not 0 <= parity <= 1:
        raise PolicyError(f"parity={shown(parity)} is not understood: use 'train', 'eval', a number between 0 and 1, or False")
    return float(parity)


def _checked_products(products: Any, low: Format | None, plan: CastPlan | None, backend: Any) -> ProductPolicy | None:
    """`products` as `parse_products` reads it; PolicyError if the other options leave nothing for it to choose."""
    checked = parse_products(products, not is_word(backend, "eager"))
    if checked is not None and plan is not None:
        raise PolicyError("plan= says which products run in fp8 and leaves products= nothing to choose; edit the plan, or pass one of them")
    if checked is not None and low not in (None, BASE):
        scaled = "a loss scale and the scales of fp8 gradients would fight over the same range"
        why = scaled if low.narrow else "fp8 copies are made of low values, and fp32 has none"
        raise PolicyError(f"products={shown(products)} needs dtype={BASE.name!r}, not {low.name!r}: {why}")
    return checked


def _check_high(high: Any) -> None:
    if is_word(high, "tf32"):
        raise PolicyError(
            "high='tf32' cannot be done by region: PyTorch has one TF32 switch for the whole process; "
            "torch.set_float32_matmul_precision('high') sets it, and the planner prices fp32 by it"
        )
    if not is_word(high, "fp32"):
        raise PolicyError(f"high={shown(high)} is not understood: what is not low runs in 'fp32'")


def optimizers_of(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """One optimizer or several as a list; PolicyError for anything else."""
    if optimizer is None:
        return []
    if isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        return [optimizer_inside(optimizer)]
    if not isinstance(optimizer, Iterable):
        raise PolicyError(f"optimizer= takes a torch.optim.Optimizer or several, not {type(optimizer).__name__}")
    found = list(optimizer)
    for each in found:
        if not (isinstance(each, torch.optim.Optimizer) or hasattr(each, "optimizer")):
            raise PolicyError(f"optimizer= takes a torch.optim.Optimizer or several, not {type(each).__name__}")
    return [optimizer_inside(each) for each in found]
