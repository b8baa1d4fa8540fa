"""Estimate the output error that each single rounding causes. A few backward passes give the estimates for all roundings at once.

1. Run the model in fp32, op by op. Each op reads each operand through a separate alias, which stands for an *edge* (value, reader).
2. Multiply the outputs by random signs z and run backward. For an edge with gradient g and rounding error d of its value, the mean of
   sum(d**2 * g**2) over draws of z is the squared output error that rounding the value for this reader causes
   (Hutchinson's estimator; roundings are assumed to be independent).
3. Divide by the squared norm of the outputs. The result is the square of a relative L2 error, and the errors of edges add up. For
   `metric="logprob"` the draws have Fisher's information as covariance (`amprewrite.accuracy.strict.metric`), and errors add up in nats.

The estimate is of first order, as in other mixed-precision planners (Gaudi's AMP by IP, arXiv 2505.13060; HAWQ-V3). If rounding an element
gives infinity, its d is the whole element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from rich.table import Table
from torch import nn

from amprewrite.accuracy.strict.edges import EdgeProbe, Edges
from amprewrite.accuracy.strict.metric import Metric, parse_metric
from amprewrite.accuracy.trial import MOST_KEPT, Batches, Forward, Trial
from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.uncaptured import closed_if_raised
from amprewrite.ir.evidence.ranges import as_text
from amprewrite.passes.driver import rewrite_graph
from amprewrite.runtime.model.rewritten import module_of
from amprewrite.runtime.options import Options
from amprewrite.tables.boundary.printable import bar
from amprewrite.tables.errors import CalibrationError
from amprewrite.tables.formats import DEFAULT_LOW, Format, parse_format

PROBES = 4
"""Number of backward passes per batch, each from new random signs. A few are enough: each estimate sums over all elements of a value."""


@dataclass(frozen=True)
class Cause:
    """The output error that one node causes if it runs low and all other nodes run in fp32."""

    name: str
    """Name of the node in the plan."""
    op: str
    error: float
    """Estimated output error, in the unit of the `Sensitivity` report."""
    result: float
    """Error from rounding the node's result alone. In relative L2, `error` is the root of the sum of squares of `result` and `operands`."""
    operands: float
    """Error from rounding the node's operands alone, weights included."""
    module: str = ""
    source: str = ""


@dataclass(frozen=True)
class Sensitivity:
    """Result of `sensitivity`: nodes ranked by the output error that each causes alone if it runs low, worst first."""

    low: str
    causes: tuple[Cause, ...]
    unit: str = "relative L2"
    """Unit of all errors: "relative L2", or nats of KL divergence."""

    def table(self, n: int = 20) -> Table:
        """Return a rich table of the `n` nodes with the largest errors."""
        table = Table(title=f"output error ({self.unit}) that each node causes alone in {self.low}: the {min(n, len(self.causes))} worst")
        for title in ("node", "module", "error", "by its result", "by its operands"):
            table.add_column(title, justify="left" if title in ("node", "module") else "right")
        for cause in self.causes[:n]:
            table.add_row(cause.name, cause.module, f"{cause.error:.2e}", f"{cause.result:.2e}", f"{cause.operands:.2e}")
        return table

    def __str__(self) -> str:
        return as_text(self.table())


def sensitivity(
    model: nn.Module | torch.export.ExportedProgram,
    batches: Iterable[Any],
    *,
    dtype: Any = DEFAULT_LOW.name,
    forward: Forward | None = None,
    metric: Any = None,
) -> Sensitivity:
    """Rank the nodes of `model` by the output error that each causes alone if it runs in `dtype`, on the first 8 batches at most.

    `batches` and `forward` are the same as for `amprewrite.calibrate`. `metric="logprob"` ranks by the divergence of the next token's
    probabilities, in nats. None ranks by the relative L2 error of all outputs. So does a function, since it cannot rate single roundings.

    Raises CalibrationError if batches do not fit the model, or if no floating output depends on its inputs or weights. Raises
    PolicyError for an unknown dtype or metric.
    """
    module, low = module_of(model), parse_format(dtype)
    trial, asked = Trial(module, Options(low), forward), parse_metric(metric)
    edges = measure_edges(trial, list(islice(Batches(batches, module, forward is not None), MOST_KEPT)), low, asked)
    causes = []
    regions = [part for captured in trial.graphs.values() for part in rewrite_graph(captured)[1].flat(captured.problem.name)]
    names = dict(each for captured in trial.graphs.values() for each in _names(captured, captured.problem.name))
    for captured, found in edges:
        into: dict[str, float] = defaultdict(float)
        out: dict[str, float] = defaultdict(float)
        for (value, reader), squared in found.items():
            out[value] += squared
            into[reader] += squared
        for node in captured.problem.graph:
            total = out[node.name] + into[node.name]
            if node.role == "op" and total:
                name = f"{names[id(captured)]}/{node.name}" if len(regions) > 1 else node.name
                error, result, operands = map(asked.of_squares, (total, out[node.name], into[node.name]))
                causes.append(Cause(name, node.op, error, result, operands, node.module, node.source))
    return Sensitivity(low.name, tuple(sorted(causes, key=lambda cause: -cause.error)), asked.estimated)


def _names(captured: Captured, name: str) -> Iterator[tuple[int, str]]:
    """Yield (id of a graph, its name in a plan) for `captured` and its checkpoint bodies: `name`, `name` + ".body_0", and so on."""
    yield id(captured), name
    for part in captured.parts.values():
        yield from _names(part, f"{name}.{part.problem.name}")


def measure_edges(trial: Trial, batches: Sequence[Any], low: Format, metric: Metric) -> list[tuple[Captured, Edges]]:
    """Return (graph, {edge (value, reader): squared output error}) for each captured graph that runs. Errors are means over `batches`.

    The error of an edge is the output error from rounding the value to `low` for this reader only. Raises CalibrationError if a batch
    cannot be run, nothing can be captured, or no floating output depends on inputs or weights.
    """
    probe = EdgeProbe(low)
    generator = torch.Generator().manual_seed(0)

    def weigh(output: Any) -> None:
        outputs = [t for t in metric.outputs(output) if t.requires_grad]
        trial.check_captured()
        size = metric.size(outputs)
        if not size:
            raise CalibrationError(f"no floating output of {trial.name} depends on its inputs or weights: there is no error to measure")
        probe.weight = 1 / (size * PROBES * len(batches))
        for draw in range(PROBES):
            signs = [metric.draw(t, generator) for t in outputs]
            torch.autograd.grad(outputs, probe.leaves, signs, retain_graph=draw + 1 < PROBES, allow_unused=True)
        probe.leaves.clear()

    with bar("batches weighed", len(batches)) as advance:
        for batch in batches:
            try:
                with torch.inference_mode(False), torch.enable_grad(), closed_if_raised():
                    trial.run(batch, probe, weigh)
            except RuntimeError as error:
                said = f"{trial.name} cannot be run on a batch with its values cut apart: {type(error).__name__}: {error}"
                raise CalibrationError(f"{said}; of a model that takes gradients itself use amprewrite.debug") from error
            advance()
    return list(probe.edges.values())
