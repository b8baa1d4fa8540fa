"""The public functions `rewrite`, `restore` and `plan`, and the checks of their options.

The first call imports the modules that need Dynamo, so that importing these functions stays cheap.
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
from amprewrite.ir.policies.policy import Policy, ProductPolicy, parse_overrides, parse_pad, parse_products
from amprewrite.report.cast_plan import CastPlan
from amprewrite.runtime.options import MODEL, Options, parse_granularity
from amprewrite.runtime.training.loss_scale import parse_loss_scale
from amprewrite.runtime.training.optimizers.find_optimizers import optimizer_inside
from amprewrite.runtime.weights.half_values import half_put_back, refuse_trainable
from amprewrite.runtime.weights.half_values import upcast as to_fp32
from amprewrite.tables.boundary.arguments import flag, is_flag, is_word, keywords, shown
from amprewrite.tables.boundary.members import named_modules_in, named_parameters_in
from amprewrite.tables.devices import best_format, named_device
from amprewrite.tables.errors import OpListError, PlanError, PolicyError
from amprewrite.tables.extras import load_extra
from amprewrite.tables.formats import BASE, FP32, LOW_FORMATS, Format, parse_format
from amprewrite.tables.ops.op_lists import PRESETS, OpLists, op_lists

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
    """Return a mixed-precision clone of `model`: same class, same Parameter and buffer objects, fp32 inputs and outputs.

    The first call of the clone captures the model as graphs, with the real inputs. `example_inputs` (positional arguments, as a tuple)
    and `example_kwargs` (keyword arguments) capture it at once, so that `amp.plan` exists before a call. The original does not change.

    Args:
        model: an nn.Module (a GraphModule too), or a torch.export.ExportedProgram.
        optimizer: one optimizer or several that step this model's parameters. A step with overflowed gradients is skipped. Optimizers
            that are not given here are found at their first step.
        dtype: the low format: "bf16", "fp16" or a torch dtype. None chooses the best format of the device, which may be fp32.
        lists: the op lists: the preset "default", "tf", "autocast", "o2" or "o3", or an OpLists value.
        overrides: formats by op, module path pattern or node name:
            `{"softmax": "deny", "module:encoder.layer.0.*": "fp32", "node:linear_3": "low"}`. For a module or node, "wide" makes
            matrix products read bf16 and return fp32.
        plan: a plan, edited or not, to follow instead of deciding. A plan that does not fit the captured graphs raises PlanError.
        calibration: the result of `amprewrite.calibrate`, or batches to calibrate with. In fp16, values that would overflow or be
            flushed to zero then stay fp32, and the plan gives the figures. With `products=`, graphs without gradients get constant
            scales for fp8 copies. Batches run in the model's current mode (train or eval).
        tolerance: largest error of the outputs that is allowed, such as 1e-3: the relative L2 error, or the error that `metric` defines.
            The cheapest plan found within this error is taken.
        accuracy: "autocast" takes the cheapest plan found with an error no larger than under torch.autocast's rules. `tolerance` and
            `accuracy` measure errors on the calibration batches, or on `example_inputs`; see `amprewrite.accuracy.frontier.search`.
        metric: the error that `tolerance` and `accuracy` measure. None or "l2" is the relative L2 error of all outputs. "logprob" is
            the mean Kullback-Leibler divergence, in nats, between the next token's probabilities (the softmax of the logits) and
            those of the fp32 model. A function takes (fp32 output, output) and returns the error.
        device: name of the device to plan for ("h100", "a100", "cpu", …; all are in `amprewrite.tables.devices.NAMED`). None plans for
            the device that the model is on. The named device gives the cost table and, with dtype=None, the format. Whether PyTorch has
            a low kernel for an op still depends on the device that the model is on.
        memory: price of a gigabyte of activations kept for backward, in seconds, such as 0.01; 0 plans for speed.
        parity: whether all graphs of the model share one plan, so that training, evaluation, inference and exports compute the same
            numbers. "train" minimises the cost of a training step, "eval" the cost of a pass without gradients, and a number between 0
            and 1 (the weight of a training step) a mean of both. An op then has one format in all graphs, whatever their sizes. The first
            captured graph decides. If a later graph must keep an op in fp32, the op stays fp32 in all graphs from then on. With False,
            each graph gets its own cheapest plan, and numbers differ by rounding.
        measure: whether to time ops and casts on the device at hand instead of using the cost table. Times are cached on disk.
        high: the format of ops that are not low; only "fp32" is valid. TF32 cannot be set here, since PyTorch has one TF32 setting for
            the whole process: changing it for one graph would affect other code and break torch.compile's guards. If TF32 is on
            (`torch.set_float32_matmul_precision("high")`), ops in fp32 use it and are priced accordingly.
        loss_scale: "auto" (dynamic for fp16, none for bf16), "dynamic", the name of a preset, a number for a static scale, None, or
            a LossScale, which several models may share. The scale is built into the training graphs: gradients arrive unscaled.
        granularity: "model" captures as much as possible in one graph. "blocks" captures each repeated block by itself, as needed if
            FSDP2 shards each block. A list of module paths (shell patterns) names the blocks. All blocks share one loss scale.
        pad: when to round the dims of low matrix products up to the multiple that Tensor Cores need: "auto" (if the device's cost table
            predicts a gain), "always", "never", "measure" (if timing on the GPU shows a gain), a multiple, or a mapping by module:
            `{"module:encoder.*": …}`. Parameters, gradients, state_dict and results keep their sizes.
        products: which bf16 matrix products (linear, addmm, mm, matmul with a 2-d matrix) may read fp8 copies of their operands if that
            is faster: "fp8" (one scale per tensor), "fp8-rowwise" (one scale per row), "fp8-safe" (one scale per row; gradients of weights
            stay bf16), or "fp8-all" (like "fp8", but for all products that the kernels take, even if slower; meant for tests). A mapping
            adds rules: `{"preset": "fp8-safe", "module:head": "bf16", "node:linear_3.grad_weight": "bf16", "module:blocks.*": "fp8"}`. None
            means no fp8. Needs dtype="bf16". A device without fp8 units emulates fp8, and only for "fp8-all" or a rule with value "fp8".
        backend: any torch.compile backend, by name or as a callable, for the rewritten graphs. "inductor" keeps fp32 inside its
            kernels, so its numbers differ from "eager" by rounding; "inductor-exact" fuses less and gives the same numbers.
        cache_weights: how long to keep low copies of weights. With True, each weight is cast where it is read, so that no write to a
            weight is missed. In calls without gradients, `amp.frozen_weights()` keeps copies for a `with` block, and `generate()` for
            its own duration. With "step", copies are kept until any optimizer steps, the mode changes or weights are loaded. Copies of
            weights that take no gradient are kept longer. Eager training keeps copies, too: gradient accumulation casts each weight once.
            With "step", call `amp.weights_changed()` after writes that PyTorch does not count (`.data`, NumPy, DLPack, collectives): later
            calls notice most such writes and warn, but not all. With False, no copy is kept, not even by `generate()`.
        strict: whether code that cannot be captured raises CaptureError instead of running in fp32 with a warning.
        inplace: whether to turn `model` itself into the rewritten model and return it, for code that keeps its model object, as many
            trainers do. `amprewrite.restore(model)` undoes it. If anything raises, the model does not change.
        upcast: whether to convert parameters that are bf16 or fp16 and take gradients to fp32 master weights, in place, for a checkpoint
            that was loaded in half precision. The original model shares these parameters, so they are fp32 there, too. `amp.plan` notes
            their number. Half parameters that take no gradients do not change. With False, trainable half parameters raise PolicyError.

    Raises:
        PolicyError: invalid options.
        CaptureError: the model cannot be captured, or with `strict=True` computes other values when captured.
        PlanError: `plan` does not fit the captured graphs.
        CalibrationError: batches cannot be run, or `calibration` is of another model.
        AccuracyError: no plan found meets `tolerance` or `accuracy`.
    """
    from amprewrite.api.module import Rewritten
    from amprewrite.runtime.compiler.dynamo import refuse_ambient_autocast
    from amprewrite.runtime.model.rewritten import is_rewritten, module_of, plain_of, put_back_on_error, wrap, wrap_in_place
    from amprewrite.runtime.weights.freezing import refuse_frozen

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
    example = None if example_inputs is None and example_kwargs is None else (tuple(example_inputs or ()), example_kwargs or {})
    with half_put_back(module):
        note = to_fp32(module) if upcast else ""
        plain = plain_of(module) if is_rewritten(module) else module
        if isinstance(calibration, Calibration):
            calibration.check(plain)
            options, calibration = replace(options, calibration=calibration), None
        measured = {"calibration": calibration, "tolerance": tolerance, "accuracy": accuracy, "metric": metric}
        if asked := next((word for word, value in measured.items() if value is not None), ""):
            options = load_extra("accuracy", f"{asked}=").search_options(plain, options, example, **measured)
        if not inplace:
            return _ready(wrap(plain, options, Rewritten), optimizer, example, note)  # type: ignore[no-any-return]
        with put_back_on_error(module):
            return _ready(wrap_in_place(module, options, Rewritten), optimizer, example, note)  # type: ignore[no-any-return]


def _ready(amp: Any, optimizer: Optimizers, example: tuple[tuple[Any, ...], Mapping[str, Any]] | None, note: str) -> Any:
    """Attach the optimizers to `amp`, capture `amp` if `example` inputs are given, and return `amp`. After an error, detach the optimizers.

    `note` is added to the notes of the model's plan; "" adds none.
    """
    from amprewrite.runtime.model.rewritten import capture_now, session_of

    if note:
        session_of(amp).note(note)
    try:
        for each in optimizers_of(optimizer):
            amp.attach(each)
        if example is not None:
            capture_now(amp, *example)
    except BaseException:
        session_of(amp).training.gate.retire()
        raise
    return amp


def restore(model: M) -> M:
    """Turn a rewritten model back into the plain fp32 model, in place, and return it.

    Parameters, buffers, hooks and the result of an earlier `.compile()` are kept. The optimizers of the model no longer skip steps.

    Raises PolicyError if `model` is no module or is frozen, PlanError if it was never rewritten, and CaptureError if it went through
    fully_shard after the rewrite.
    """
    from amprewrite.runtime.model.rewritten import unwrap_in_place

    if not isinstance(model, nn.Module):
        raise PolicyError(f"restore takes a rewritten nn.Module, not {type(model).__name__}")
    unwrap_in_place(model)
    return model


def plan(model: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> CastPlan:
    """Return the plan that `rewrite(model, **options)` makes for these inputs. The model itself is not rewritten.

    Args:
        args: the positional arguments of one call, as a tuple. The plan depends on their shapes, dtypes and devices, and on grad mode.
        kwargs: the keyword arguments of the call.
        options: the options of `rewrite`. With `upcast=True`, parameters are fp32 only during this call.

    Raises the same errors as `rewrite`.
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
    """Check the options of `rewrite` that can be checked without the model, and return them parsed. Raises the same errors as `rewrite`."""
    if not is_flag(cache_weights) and not is_word(cache_weights, "step"):
        raise PolicyError(f"cache_weights={shown(cache_weights)} is not understood: use True, False or 'step'")
    if plan is not None and not isinstance(plan, CastPlan):
        raise PolicyError(f"plan= takes a CastPlan (CastPlan.from_json reads one), not {type(plan).__name__}")
    if plan is not None:
        dtype = plan.low if dtype is None else dtype
        # by default take the op lists of the plan, because the plan fits only graphs that are read with these lists
        lists = plan.lists if is_word(lists, "default") and plan.lists in PRESETS else lists
    cache_weights = cache_weights if isinstance(cache_weights, str) else bool(cache_weights)
    strict = flag("strict", strict)
    low = None if dtype is None else parse_format(dtype)
    row = _checked_device(device, flag("measure", measure))
    supposed = low or (best_format(named_device(device)) if device is not None else None) or LOW_FORMATS[1]
    if plan is not None and low is not None and plan.regions and plan.low != low.name:
        raise PlanError(f"the plan is for low = {plan.low}, dtype= asks for {low.name}; leave dtype= out, or make a plan for {low.name}")
    checked = parse_overrides({} if overrides is None else overrides, supposed)
    if checked and plan is not None:
        raise PolicyError("plan= chooses formats, as overrides= does; put the overrides into the plan with plan.edit")
    if not isinstance(lists, str | OpLists):
        raise OpListError(f"lists={shown(lists)} is no preset; use the name of one, or an OpLists value")
    name = op_lists(lists, low or LOW_FORMATS[1], "cpu").name
    if plan is not None and plan.regions and name not in ("default", plan.lists):
        raise PlanError(f"the plan is for lists = {plan.lists}, lists= asks for {name}; leave lists= out, or make a plan with these lists")
    _check_backend(backend)
    if low is FP32 and plan is None:
        lists = op_lists("default", LOW_FORMATS[1], "cpu")
    _check_high(high)
    return Options(
        low, lists, checked, backend, cache_weights, strict, plan,
        loss_scale=_checked_scale(loss_scale, low),
        device=row,
        measure=bool(measure),
        memory=_checked_memory(memory),
        pad=parse_pad(pad, torch.cuda.is_available()),
        parity=_checked_parity(parity),
        products=_checked_products(products, low, plan, backend),
    )  # fmt: skip


def check_patterns(options: Options, module: nn.Module) -> None:
    """Raise PolicyError if a module pattern in `overrides`, `pad` or `products` matches no module of the model."""
    paths = [path for path, _ in named_modules_in(module)]
    Policy(options.low or LOW_FORMATS[1], overrides=options.overrides).check("module", paths)
    options.pad.check_modules(paths)
    if options.products is not None:
        options.products.check("module", paths)


def _check_backend(backend: Any) -> None:
    if not (isinstance(backend, str) or callable(backend)):
        raise PolicyError(f"backend= takes the name of a torch.compile backend or a callable, not {type(backend).__name__}")
    if is_word(backend, "amprewrite"):  # the name under which torch.compile finds this library
        raise PolicyError("backend='amprewrite' would rewrite a rewritten graph; name the compiler: 'inductor' or 'eager'")
    if not is_word(backend, "eager"):
        from amprewrite.runtime.compiler.dynamo import EXACT, lookup_backend

        try:
            lookup_backend(backend)
        except PolicyError:
            raise
        except Exception as error:
            known = ", ".join((EXACT, *(each for each in torch.compiler.list_backends() if each != "amprewrite")))
            raise PolicyError(f"backend={shown(backend)} is no torch.compile backend; there are eager, {known}") from error


def _checked_scale(loss_scale: Any, low: Format | None) -> Any:
    """Return `loss_scale`, with "none" for None. Raises PolicyError if it is invalid for the format `low` (None: not known yet)."""
    if loss_scale is None:
        loss_scale = "none"
    parse_loss_scale(loss_scale, low or FP32)
    return loss_scale


def _checked_device(device: Any, measure: bool) -> str:
    """Return the name of the device to plan for. If none is given, return "", which stands for the device at hand.

    Raises PolicyError for an unknown name, or for any name with `measure`, because only the device at hand can be timed.
    """
    if device is None:
        return ""
    if measure:
        raise PolicyError(f"measure=True times the device at hand, device={shown(device)} plans for another: choose one")
    named_device(device)
    return str(device)


def _checked_memory(memory: Any) -> float:
    """Convert the price `memory` from seconds per gigabyte to seconds per byte. Raises PolicyError if it is not finite, or negative."""
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 <= memory < math.inf:
        raise PolicyError(f"memory={shown(memory)} is no price; give the seconds that a gigabyte kept for backward is worth, or 0")
    return memory / 1e9


def _checked_parity(parity: Any) -> float | None:
    """Return the option `parity` as a number; None if graphs need not share one plan.

    It is the weight, from 0 to 1, of a training step in the cost of the shared plan; the rest is the weight of a pass without gradients.
    """
    words = {"train": 1.0, "eval": 0.0}
    if isinstance(parity, str) and parity in words:
        return words[parity]
    if is_flag(parity):
        return words["train"] if parity else None
    if not isinstance(parity, int | float) or not 0 <= parity <= 1:
        raise PolicyError(f"parity={shown(parity)} is not understood: use 'train', 'eval', a number between 0 and 1, or False")
    return float(parity)


def _checked_products(products: Any, low: Format | None, plan: CastPlan | None, backend: Any) -> ProductPolicy | None:
    """Return the parsed option `products`; None if it is not given. Raises PolicyError if it contradicts the other options."""
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
        raise PolicyError(f"high={shown(high)} is not understood: ops that are not low run in 'fp32'")


def optimizers_of(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """Return one optimizer or several as a list, without wrappers such as accelerate's. Raises PolicyError for any other object."""
    if optimizer is None:
        return []
    alone = isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer")
    found: list[Any] = [optimizer] if alone or not isinstance(optimizer, Iterable) else list(optimizer)
    for each in found:
        if not (isinstance(each, torch.optim.Optimizer) or hasattr(each, "optimizer")):
            raise PolicyError(f"optimizer= takes a torch.optim.Optimizer or several, not {type(each).__name__}")
    return [optimizer_inside(each) for each in found]
