"""The functions of this package that other packages call. `search_options` serves the options of `rewrite` that run the model on data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from amprewrite.accuracy.calibrate import calibrate
from amprewrite.accuracy.debug import debug
from amprewrite.accuracy.frontier import search
from amprewrite.accuracy.sensitivity import sensitivity
from amprewrite.accuracy.strict.metric import parse_metric
from amprewrite.accuracy.trial import CallArguments, tee
from amprewrite.accuracy.verify import verify
from amprewrite.runtime.options import Options
from amprewrite.tables.errors import PolicyError


def search_options(
    module: nn.Module,
    options: Options,
    example: tuple[tuple[Any, ...], Mapping[str, Any]] | None,
    calibration: Any,
    tolerance: float | None,
    accuracy: str | None,
    metric: Any,
) -> Options:
    """Return `options`, completed by runs of the model on batches. `rewrite` documents the arguments and the errors.

    If `calibration`, an iterable of batches, is given, the result has the value ranges measured on them. If `tolerance` or `accuracy` is
    given, the result has the ops that must stay fp32 to meet it. They are found on the first of these batches or, without `calibration`, on
    `example`, the (args, kwargs) of one call.
    """
    batches = [] if example is None else [CallArguments(*example)]
    if calibration is not None:
        batches = []
        options = replace(options, calibration=calibrate(module, tee(calibration, batches), progress=False))
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


__all__ = ["calibrate", "debug", "search_options", "sensitivity", "verify"]
