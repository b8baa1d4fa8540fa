"""Check that raising the opset of a model has not changed its results.

1. The original model runs on the samples, and its results are compared with those of the raised model.
2. ONNX Runtime lacks kernels for many old ops. If the original does not run, the schemas must show that no op changed, or onnx's own
   evaluator must give the same results. The evaluator runs some old ops by their new rules, so a difference does not prove a mistake.
3. A model may be raised in two steps. If the original does not run, the model after the first step is compared, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from amprewrite.graphs.onnx.guesses import to_proto
from amprewrite.graphs.onnx.ops import changed_ops
from amprewrite.graphs.onnx.run.compare import relative_error
from amprewrite.graphs.onnx.run.onnx_runtime import Runnable, TimeLimit, is_large, run_within
from amprewrite.graphs.onnx.run.samples import Samples
from amprewrite.tables.errors import CaptureError
from amprewrite.tables.ops.onnx_names import FLOW

SAME = 1e-3
"""Relative error up to which two opsets of one model count as equal: their kernels may sum in another order."""


def check_raised(name: str, stages: Sequence[ir.Model], samples: Samples, limit: TimeLimit = "auto") -> None:
    """Raise CaptureError unless the raised model is shown to compute the same as the original.

    `stages` are the original model, the model after each change of its opset but the last, and the raised model, which made `samples`.
    """
    for before, after in pairwise(stages):
        opset, raised = before.opset_imports[""], after.opset_imports[""]
        changed = changed_ops(before, raised)
        found = _runs(before, samples, limit)
        if found is not None:
            error = relative_error(found, samples.outputs)
            if not error <= SAME:
                said = f"onnx's version converter changes what {name} gives (by {error:.3g})"
                raise CaptureError(f"{said} when it raises its opset to {stages[-1].opset_imports['']}; export it again at a newer opset")
            return
        evaluated = _evaluations(before, samples) if changed else None
        if changed and (evaluated is None or not relative_error(evaluated, samples.outputs) <= SAME):
            raise CaptureError(
                f"{name} is of opset {opset}, and must be raised to {raised}, up to which {', '.join(changed)} changed; whether it gives "
                f"the same cannot be seen without a sample on which both run: pass calibration= on which they do, or export it at {raised}"
            )


def _runs(model: ir.Model, samples: Samples, limit: TimeLimit) -> list[list[Any]] | None:
    """Return the results of ONNX Runtime on the samples; None if there are none, if it does not run the model, or if two runs differ."""
    if not samples.feeds:
        return None
    with Runnable(model, limit) as runnable:
        if runnable.invalid() and runnable.failure(samples.feeds):
            return None
        try:
            runner = runnable.session()
            once, again = ([run_within(runner, None, feed, runnable.seconds) for feed in samples.feeds] for _ in range(2))
        except Exception:
            return None
    return once if relative_error(once, again) == 0 else None


def _evaluations(model: ir.Model, samples: Samples) -> list[list[Any]] | None:
    """Return the results of onnx's own evaluator on the samples; None if it does not run the model, or if two runs differ.

    The evaluator is not tried without samples, on a model too large for one protobuf, and, as it has no time limit, on a model with an If,
    a Loop or a Scan.
    """
    if not samples.feeds or is_large(model) or any(node.op_type in FLOW for graph in model.graphs() for node in graph):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runner: Any = ReferenceEvaluator(to_proto(model))
            once, again = ([runner.run(None, feed) for feed in samples.feeds] for _ in range(2))
        return once if relative_error(once, again) == 0 else None
    except Exception:  # the evaluator does not know the old forms of some ops
        return None
