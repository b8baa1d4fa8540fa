"""Metrics of a model's output error: over all floating outputs, over the next token's probabilities, or by a user's function.

1. *Relative L2 error* of all floating outputs together; over batches, its root mean square.
2. `"logprob"`: the mean Kullback-Leibler divergence, in nats, of the probabilities (softmax of the logits) from the fp32 probabilities p.
   To second order it is half of δᵀ F δ, where δ is the error of the logits and F = diag(p) − p pᵀ (Kullback 1959). So backward passes that
   start with random gradients of covariance F, √p·s − p·Σ(√p·s) with random signs s, can estimate the error of each rounding.
3. A user's function of (fp32 output, output) that returns a number. The function's error cannot be estimated for single roundings. So the
   candidate plans are chosen by relative L2 error, and the function then measures the error of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amprewrite.runtime.compiler.capture_check import relative_error, results_of
from amprewrite.tables.boundary.arguments import is_word, shown
from amprewrite.tables.errors import CalibrationError, PolicyError
from amprewrite.torch_internals.trees import tree_map

Function = Callable[[Any, Any], float]


@dataclass(frozen=True)
class Metric:
    """The relative L2 error of all floating outputs. It is also the base class of the other metrics."""

    unit: str = "relative L2"
    estimated: str = "relative L2"
    """Unit of the estimated errors that `of_squares` returns."""

    def error(self, exact: Any, got: Any) -> float:
        """Return the error of a batch's output `got` against the fp32 output `exact`; inf if shapes differ or a number overflows."""
        return relative_error(results_of(got), results_of(exact))

    def over(self, errors: Sequence[float]) -> float:
        """Combine the errors of all batches into one: here their root mean square."""
        return math.sqrt(sum(error**2 for error in errors) / len(errors))

    def outputs(self, output: Any) -> list[Tensor]:
        """Return the tensors in a model's output whose errors the metric counts."""
        return results_of(output)

    def size(self, outputs: Sequence[Tensor]) -> float:
        """Return the number by which a sum of squared errors is divided: here the squared norm of `outputs`, for a relative error."""
        return sum(t.detach().double().square().nan_to_num(0, 0, 0).sum().item() for t in outputs)

    def draw(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Return a random gradient with which backward starts at `output`: here random signs, so that all elements count equally."""
        signs = (torch.randint(0, 2, output.shape, generator=generator, device="cpu") * 2 - 1).to(output)
        return torch.where(output.detach().isfinite(), signs, 0)

    def of_squares(self, squared: float) -> float:
        """Convert a sum of squared errors, divided by `size`, into the unit of the metric: here the square root."""
        return math.sqrt(squared)


@dataclass(frozen=True)
class LogProb(Metric):
    """The mean Kullback-Leibler divergence, in nats, of the next token's probabilities from the probabilities of the fp32 run."""

    unit: str = "KL divergence, nats"
    estimated: str = unit

    def error(self, exact: Any, got: Any) -> float:
        wanted, found = logits_of(exact), logits_of(got)
        if wanted.shape != found.shape:
            return math.inf
        reference, other = (t.detach().double().log_softmax(-1) for t in (wanted, found))
        probable = reference.exp()
        found_kl = torch.where(probable > 0, probable * (reference - other), 0).sum(-1).mean().item()
        return max(found_kl, 0.0) if not math.isnan(found_kl) else math.inf

    def over(self, errors: Sequence[float]) -> float:
        return sum(errors) / len(errors)

    def outputs(self, output: Any) -> list[Tensor]:
        return [logits_of(output)]

    def size(self, outputs: Sequence[Tensor]) -> float:
        return 2.0 * sum(t.numel() // t.shape[-1] for t in outputs)

    def draw(self, output: Tensor, generator: torch.Generator) -> Tensor:
        signs = (torch.randint(0, 2, output.shape, generator=generator, device="cpu") * 2 - 1).to(output)
        p = output.detach().softmax(-1).nan_to_num(0, 0, 0)
        root = p.sqrt() * signs
        return root - p * root.sum(-1, keepdim=True)

    def of_squares(self, squared: float) -> float:
        return squared


@dataclass(frozen=True)
class Judged(Metric):
    """The error that a user's function of (fp32 output, output) returns; inf for NaN. Raises PolicyError if it is negative or no number."""

    unit: str = "by the function given"
    function: Function = lambda exact, got: math.nan

    def error(self, exact: Any, got: Any) -> float:
        found = self.function(exact, got)
        try:
            error = float(found)
        except (TypeError, ValueError, RuntimeError) as failed:
            raise PolicyError(f"metric= must give a number, not {shown(found)}: {failed}") from failed
        if error < 0:
            raise PolicyError(f"metric= gave {error:g}: an error is not negative; return its size")
        return math.inf if math.isnan(error) else error

    def over(self, errors: Sequence[float]) -> float:
        return sum(errors) / len(errors)


def logits_of(output: Any) -> Tensor:
    """Return the logits in a model's output.

    They are the output itself if it is a tensor, otherwise its `logits`. In a tuple or list, they are the first floating tensor with two
    dims or more. Raises PolicyError if the output has no logits.
    """
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    found = output if isinstance(output, Tensor) else found
    if found is None and isinstance(output, tuple | list):
        found = next((t for t in output if isinstance(t, Tensor) and t.is_floating_point() and t.dim() >= 2), None)
    if not isinstance(found, Tensor) or not found.is_floating_point() or not found.dim() or not found.numel():
        raise PolicyError(
            f"metric='logprob' finds no logits in the model's output, a {type(output).__name__}: return them or an object with .logits, "
            "or give a function of (fp32 output, output) as metric="
        )
    return found


def parse_metric(metric: Any) -> Metric:
    """Return the metric that the option `metric=` asks for. Raises PolicyError if it asks for no known metric."""
    if metric is None or is_word(metric, "l2"):
        return Metric()
    if is_word(metric, "logprob"):
        return LogProb()
    if callable(metric) and not isinstance(metric, type):
        return Judged(function=metric)
    raise PolicyError(f"metric={shown(metric)} is not understood: use 'l2', 'logprob', or a function of (fp32 output, output)")


def kept(output: Any) -> Any:
    """Return a copy of a model's output that shares no tensor memory with it."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, output)


def check_reference(outputs: Sequence[Tensor], name: str, index: int) -> None:
    """Raise CalibrationError if the fp32 `outputs` for batch `index` are empty or hold NaN: no plan can be compared with them."""
    if not outputs:
        raise CalibrationError(f"{name} gives no floating tensor for batch {index}: there is no error to measure")
    if any(bool(t.isnan().any()) for t in outputs):
        raise CalibrationError(f"{name} gives NaN in fp32 for batch {index}: no plan can be compared with that")
