"""The functions of this package that other packages call. `search_options` evaluates the options of `rewrite` that need runs on data.

`calibrate` records the ranges of a model's values on sample batches, to show where fp16 would overflow or underflow:

1. Capture the model as `rewrite` does, so that graphs and nodes have the names of the plan.
2. Run every batch in fp32, op by op. Merge the range of every fp32 result (`ValueRange.of`) into the record, and free the result.
   Without a loss, gradients are off. If the first batch fails, the model may compute gradients itself. So this batch is run again with
   gradients on, and so are all later batches.
3. If a loss is given, run backward too, and record the range of every result's gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from amprewrite.accuracy.debug import debug
from amprewrite.accuracy.frontier import search
from amprewrite.accuracy.sensitivity import sensitivity
from amprewrite.accuracy.strict.metric import parse_metric
from amprewrite.accuracy.trial import Batches, CallArguments, Forward, Loss, Trial, loss_of, tee
from amprewrite.accuracy.verify import verify
from amprewrite.graphs.fx.run.observer import Observer
from amprewrite.ir.evidence.ranges import Calibration, parameters_fingerprint
from amprewrite.runtime.model.rewritten import module_of
from amprewrite.runtime.options import MODEL, Options, parse_granularity
from amprewrite.tables.boundary.members import parameters_in
from amprewrite.tables.boundary.printable import bar
from amprewrite.tables.errors import CalibrationError, PolicyError
from amprewrite.tables.formats import LOW_FORMATS


def search_options(
    module: nn.Module,
    options: Options,
    example: tuple[tuple[Any, ...], Mapping[str, Any]] | None,
    calibration: Any,
    tolerance: float | None,
    accuracy: str | None,
    metric: Any,
) -> Options:
    """Run the model on data, and return `options` with the results added. `rewrite` documents the arguments and the errors.

    If `calibration` (an iterable of batches) is given, add the value ranges on these batches. If `tolerance` or `accuracy` limits the
    error, add the nodes that must stay fp32 to meet the limit. The search for these nodes runs on the first 8 batches or, without
    `calibration`, on `example`, the (args, kwargs) of one call.
    """
    batches = [] if example is None else [CallArguments(*example)]
    if calibration is not None:
        batches = []
        found = calibrate(module, tee(calibration, batches), granularity=options.granularity, progress=False)
        options = replace(options, calibration=found)
    parse_metric(metric)
    if tolerance is None and accuracy is None:
        if metric is not None:
            raise PolicyError(
                "metric= defines the error for tolerance= and accuracy=, and neither is given: pass one of them, or leave it out"
            )
        return options
    if options.given is not None:
        raise PolicyError("plan= decides every op and leaves nothing for tolerance= or accuracy= to choose")
    return replace(options, keep_high=search(module, batches, options, tolerance, accuracy, metric=metric).keep_high)


def calibrate(
    model: nn.Module | torch.export.ExportedProgram,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    forward: Forward | None = None,
    granularity: str | Iterable[str] = MODEL,
    progress: bool = True,
) -> Calibration:
    """Record the range of every fp32 value of `model` on `batches`, for `rewrite(model, calibration=...)`.

    The model runs in fp32, in its current mode (train or eval). Its parameters, gradients, buffers and random state do not change.
    Memory use does not grow with the number of batches.

    Args:
        batches: an iterable such as a DataLoader. A batch that is a tensor is passed as the only argument, a tuple or list as positional
            arguments, a mapping as keyword arguments. Sizes may differ between batches; structure and dtypes must not.
        loss: a function that takes the model's result and returns a tensor with one element, e.g. `lambda out: out.loss`. If given,
            backward runs too, and the calibration has the ranges of all gradients.
        forward: a function that calls the model on a batch in another way: `lambda model, batch: model(batch[0])`.
        granularity: the value that is given to `rewrite`. It decides how the model is split into graphs, and ranges are recorded by graph.
        progress: show a progress bar on a terminal or in a notebook.

    Raises:
        CalibrationError: there is no batch; batches differ in structure, hold NaN or infinities, or do not fit the model; no part of
            the model can be captured; the loss is not a tensor with one element, or depends on no parameter that takes gradients.
        PolicyError: `granularity` is invalid.
    """
    module = module_of(model)
    trial = Trial(module, Options(LOW_FORMATS[0], granularity=parse_granularity(granularity, module)), forward)
    watch = Observer(gradients=loss is not None)
    checked = Batches(batches, module, forward is not None)
    count, then, differentiable = 0, None if loss is None else partial(_backward, loss, module), loss is not None
    with bar("calibrating", len(checked) or None, progress) as advance:
        for batch in checked:
            try:
                try:
                    with torch.set_grad_enabled(differentiable):
                        trial.run(batch, watch, then)
                except RuntimeError:  # the model's forward may compute gradients, such as forces: run it again with gradients enabled
                    if differentiable or count:
                        raise
                    differentiable, watch = True, Observer()
                    with torch.enable_grad():
                        trial.run(batch, watch)
            except (TypeError, ValueError, RuntimeError, LookupError) as error:
                said = f"batch {count} cannot be run: {type(error).__name__}: {error}"
                raise CalibrationError(f"{said}; forward= says how to call the model on a batch") from error
            count += 1
            advance()
    trial.check_captured()
    return Calibration(trial.name, parameters_fingerprint(module), count, tuple(watch.regions.values()))


def _backward(loss: Loss, module: nn.Module, result: Any) -> None:
    """Run backward from `loss(result)`. Hooks that the forward pass set on results record the ranges of gradients. No `.grad` changes.

    Raises CalibrationError if the loss cannot be computed, is not a tensor with one element, or depends on no parameter that takes
    gradients.
    """
    value = loss_of(loss, result, CalibrationError)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise CalibrationError(f"loss= must give a scalar tensor, not {what}")
    parameters = [p for p in parameters_in(module) if p.requires_grad]
    if not value.requires_grad or not parameters:
        raise CalibrationError("loss= gives a value that does not depend on any parameter that takes gradients")
    torch.autograd.grad(value, parameters, allow_unused=True)


__all__ = ["Calibration", "calibrate", "debug", "search_options", "sensitivity", "verify"]
