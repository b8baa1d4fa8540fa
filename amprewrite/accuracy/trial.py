"""Capture a model as `rewrite` does, and run its graphs with a runner: a function that observes values, rounds them or takes gradients.

Calibration, the accuracy search and the sensitivity report use trials, so their graphs and nodes have the same names as in a plan.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from amprewrite.graphs.fx.captured import Captured
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.ir.policies.policy import Policy
from amprewrite.passes.driver import CapturedGraph, read_parts, read_problem
from amprewrite.runtime.ambient.kept_state import state_kept
from amprewrite.runtime.captured.entries import Graphs
from amprewrite.runtime.captured.region import Region
from amprewrite.runtime.compiler.capture_check import copied
from amprewrite.runtime.compiler.dynamo import refuse_ambient_autocast
from amprewrite.runtime.model.rewritten import RewrittenBase, plain_of, session_of, wrap
from amprewrite.runtime.options import Options
from amprewrite.runtime.session import Session
from amprewrite.tables.errors import AmpRewriteError, CalibrationError
from amprewrite.torch_internals.trees import TreeSpec, tree_flatten, tree_leaves

GraphRunner = Callable[[Captured, tuple[Any, ...]], Any]
"""A function that runs a captured graph on real inputs and returns the graph's results."""
Forward = Callable[[nn.Module, Any], Any]
"""A function that calls the model on a batch and returns the model's result."""
Loss = Callable[[Any], torch.Tensor]
"""A function that computes a loss, a tensor with one element, from the model's result."""


def loss_of(loss: Loss, output: Any, kind: type[AmpRewriteError]) -> Any:
    """Return `loss(output)`. If this call of the user's function fails, raise an error of the class `kind` instead."""
    try:
        return loss(output)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        raise kind(f"loss= takes the model's result, and fails on one {type(output).__name__}: {type(error).__name__}: {error}") from error


class _TrialSession(Session):
    """Captures graphs like the `Session` of a rewritten model, but calls `runner` for each graph instead of rewriting the graph."""

    runner: GraphRunner | None = None

    def _rewritten(self, graphs: Graphs, module: CapturedGraph, example_inputs: list[Any]) -> Region:
        captured = self.read_region(graphs, module, example_inputs)
        problem = captured.problem
        captured.by_autocast = read_problem(
            module, Policy(problem.policy.low, "autocast", parity=problem.policy.parity), name=problem.name, entry=problem.entry,
            training=problem.training, names=graphs.entry.names,
        )  # fmt: skip
        read_parts(captured)
        plan = RegionPlan(name=problem.name, nodes=(), casts=(), training=problem.training, entry=problem.entry)

        def run(*inputs: Any) -> Any:
            assert self.runner is not None, "a trial model runs in trials alone"
            return self.runner(captured, inputs)

        return Region(graphs.entry.place, self.training, self.checks, plan, run)

    def warn_fp32(self, message: str, cause: str = "") -> None:
        """Do nothing about parts that cannot be captured: the rewritten model itself warns of them."""

    def _check_options(self) -> None:
        """Do nothing. The plans of a trial session have no nodes, so the base class would refuse every option that names a node."""


class CallArguments(NamedTuple):
    """A batch given as the positional and keyword arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Trial:
    """A model whose captured graphs run through a function that the caller gives to `run`.

    A run does not change parameters, buffers, random state or the batch.
    """

    def __init__(self, model: nn.Module, options: Options, forward: Forward | None = None) -> None:
        refuse_ambient_autocast()
        plain = plain_of(model) if isinstance(model, RewrittenBase) else model
        self.options = replace(options, backend="eager", loss_scale="none", strict=False, given=None)
        self.amp = wrap(plain, self.options, kind=_TrialSession)
        self.name = type(plain).__name__
        self.forward = forward or call_on
        self.graphs: dict[int, Captured] = {}
        """Captured graphs that have run so far, by `id`, in the order of their first runs."""

    def run(self, batch: Any, runner: GraphRunner, then: Callable[[Any], Any] | None = None) -> Any:
        """Run the model on one batch and return its result. `runner` runs each captured graph on its inputs and returns its results.

        If `then` is given, return `then(result)`. Run backward only in `then`: before `run` returns, it restores the buffers in place, and
        autograd refuses a backward that needs overwritten values.
        """
        session = session_of(self.amp)
        assert isinstance(session, _TrialSession)

        def noted(captured: Captured, inputs: tuple[Any, ...]) -> Any:
            self.graphs.setdefault(id(captured), captured)
            return runner(captured, inputs)

        session.runner = noted
        try:
            with state_kept(self.amp):
                result = self.forward(self.amp, deep_copy(batch))
                return result if then is None else then(result)
        finally:
            session.runner = None

    def check_captured(self) -> None:
        """Raise CalibrationError if no captured graph of the model has run."""
        if not self.graphs:
            why = "; ".join(str(part) for part in session_of(self.amp).left_out) or "it has no op that Dynamo captures"
            raise CalibrationError(f"nothing of {self.name} could be captured, so nothing can be measured: {why}")


def deep_copy(value: Any) -> Any:
    """Return a copy of `value`, such as a batch, that shares no memory with it. Tensors with a `grad_fn` are copied, too."""
    memo = {id(leaf): copied(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
    return copy.deepcopy(value, memo)


def _is_no_list(batches: Any) -> bool:
    """True if `batches` cannot be iterated as batches: it is a single batch (tensor, array or mapping), a string, or not iterable."""
    return isinstance(batches, Mapping | str | bytes) or hasattr(batches, "__array__") or not isinstance(batches, Iterable)


# -- batches --------------------------------------------------------------------------------
def call_on(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch, and return its result.

    A mapping gives the keyword arguments, a tuple or list the positional arguments, `CallArguments` both. Anything else is one argument.
    """
    if isinstance(batch, CallArguments):
        return model(*batch.args, **batch.kwargs)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


class Batches:
    """Iterates over batches and checks each. Raises CalibrationError if a batch is faulty, or if there is none.

    All batches must have the structure and dtypes of the first, and hold no NaN or infinity. With `own_forward`, the user's function calls
    the model on a batch, so a batch may hold more values than the model takes.
    """

    def __init__(self, batches: Any, model: nn.Module, own_forward: bool) -> None:
        if _is_no_list(batches):
            raise CalibrationError(
                f"batches= takes an iterable of batches, such as a DataLoader or a list, not one {type(batches).__name__}; "
                "a single batch goes into a list, and Calibration.load reads the file of a calibration"
            )
        self.batches, self.model, self.own_forward = batches, model, own_forward
        self.spec: TreeSpec | None = None
        self.kinds: list[str] = []

    def __len__(self) -> int:
        """Number of batches; 0 if it is unknown."""
        try:
            return len(self.batches) if isinstance(self.batches, Sized) else 0
        except TypeError:  # `len` of a DataLoader over an IterableDataset raises TypeError
            return 0

    def __iter__(self) -> Iterator[Any]:
        index = -1
        for index, batch in enumerate(self.batches):
            self._check(index, batch)
            yield batch
        if index < 0:
            raise CalibrationError("there is no batch to calibrate with: the iterable is empty (a generator may be used up)")

    def _check(self, index: int, batch: Any) -> None:
        plain = dict(batch) if isinstance(batch, Mapping) else batch
        leaves, spec = tree_flatten(plain)
        kinds = [_kind(leaf) for leaf in leaves]
        if self.spec is None:
            self.spec, self.kinds = spec, kinds
            self._check_arity(batch)
        elif spec != self.spec or kinds != self.kinds:
            raise CalibrationError(
                f"batch {index} is built otherwise than the first: {_outline(spec, kinds)} where that has "
                f"{_outline(self.spec, self.kinds)}; batches may differ in size, not in structure or dtype"
            )
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                where = f" (leaf {place} of {len(leaves)})" if len(leaves) > 1 else ""
                raise CalibrationError(f"batch {index} holds NaN or infinite values{where}: clean the data, or leave the batch out")

    def _check_arity(self, batch: Any) -> None:
        if self.own_forward or not isinstance(batch, tuple | list):
            return
        try:
            taken = inspect.signature(self.model.forward).parameters.values()
        except (TypeError, ValueError):  # Python cannot tell the signature of this `forward`
            return
        names = [each.name for each in taken if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        if len(batch) > len(names) and all(each.kind is not each.VAR_POSITIONAL for each in taken):
            raise CalibrationError(
                f"a batch is a {type(batch).__name__} of {len(batch)}, and {type(self.model).__name__} takes {len(names)} "
                f"argument{'s' * (len(names) != 1)} ({', '.join(names)}); if the rest are labels, say how to call the model: "
                "forward=lambda model, batch: model(batch[0])"
            )


MOST_KEPT = 8
"""The first MOST_KEPT batches are kept for measuring errors."""


def tee(batches: Any, into: list[Any]) -> Any:
    """Return an iterable over `batches`. During iteration, it appends the first MOST_KEPT batches to `into`."""
    if _is_no_list(batches):
        return batches  # `Batches` raises the error for these `batches`, so return them unchanged

    def each() -> Iterator[Any]:
        for batch in batches:
            if len(into) < MOST_KEPT:
                into.append(batch)
            yield batch

    return each()


def _kind(leaf: Any) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')}[{leaf.dim()}d]" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _outline(spec: TreeSpec, kinds: list[str]) -> str:
    text = ", ".join(kinds)
    return f"{spec.type.__name__ if spec.type else 'a tensor'} of ({text})" if spec.num_children else text
