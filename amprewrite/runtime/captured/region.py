"""Run a rewritten graph in place of the code that Dynamo captured (`Region`), and record the calls of one rewritten model.

`State` holds the calls that run in a thread. `CallRecord` holds which graphs ran, notes for the plan, and the warnings given.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import nn

from amprewrite.graphs.fx.ops.on_device import recording
from amprewrite.graphs.fx.run.first_run import FirstRun, Refusals
from amprewrite.graphs.fx.uncaptured import closed_if_raised, pushed
from amprewrite.ir.plans.plan import RegionPlan, Skipped
from amprewrite.passes.lower.emit import CompiledFn
from amprewrite.passes.weigh_plans import weighed
from amprewrite.runtime.ambient.low_cache import LowCaches
from amprewrite.runtime.ambient.past import Past
from amprewrite.runtime.captured.look_ahead import LookAhead
from amprewrite.runtime.compiler.capture_check import CaptureCheck
from amprewrite.runtime.compiler.dynamo import suspend_dispatch_modes
from amprewrite.runtime.compiler.dynamo_failures import Failure
from amprewrite.runtime.options import Options
from amprewrite.runtime.training.overflow_probe import LatestInputs
from amprewrite.runtime.training.training import Training
from amprewrite.runtime.weights.weight_reads import ReadChecks, WeightReads
from amprewrite.tables.errors import AmpRewriteWarning, CaptureError

_IS_LEAF = operator.attrgetter("is_leaf")
Running = tuple[CompiledFn, torch.fx.GraphModule | None, WeightReads, Refusals]
"""An emitted graph: the function that runs, the edited graph (None if it scales no gradients), how the graph reads weights, and the ops
that refused low operands."""


def scale_device(graph: torch.fx.Graph) -> torch.device:
    """Return the device of the loss scale in a graph that scales gradients. The last two inputs are the scale and its inverse."""
    example: torch.Tensor = graph.find_nodes(op="placeholder")[-1].meta["example_value"]
    return example.device


class Region:
    """One rewritten graph, which Dynamo calls in place of the code that it captured.

    `module` is the edited graph, which is run op by op to find an overflow; None if the graph scales no gradients. `place` names the module
    whose code was captured. All graphs of the model share `training` (its loss scaling) and `checks` (functions that check weight reads).
    """

    whole = False
    """True if the graph covers all of its module's forward."""
    enters_regions = False
    """True if the graph enters contexts such as `torch.no_grad()`. They must be left if the graph raises an error."""

    def __init__(
        self, place: str, training: Training, checks: ReadChecks, plan: RegionPlan, run: CompiledFn,
        module: torch.fx.GraphModule | None = None, reads: WeightReads | None = None, refused: Refusals | None = None,
    ) -> None:  # fmt: skip
        self.place, self.training, self.checks = place, training, checks
        self.plan, self.run, self.module, self.reads = plan, run, module, reads or WeightReads()
        self.refused: Refusals = {} if refused is None else refused
        self.keep_high: Callable[[Refusals, tuple[Any, ...]], None] | None = None
        """Function that plans and emits the graph anew, so that the ops that refused low operands stay fp32; None after the first call."""
        self.device = torch.device("cpu") if module is None else scale_device(module.graph)
        self._past = Past[tuple[CompiledFn, WeightReads]]()
        self.latest = None if module is None else LatestInputs(plan, module)
        self.look_ahead: LookAhead | None = None
        self._weighed: tuple[RegionPlan | None, RegionPlan] = None, plan

    def weighed(self) -> RegionPlan:
        """Return the plan with prices (estimated costs) of alternative plans, such as all fp32. The first call computes the prices."""
        if (plan := self.plan) is not self._weighed[0]:
            self._weighed = plan, weighed(plan)
        return self._weighed[1]

    def become(self, plan: RegionPlan, run: CompiledFn, module: torch.fx.GraphModule | None, reads: WeightReads, refused: Refusals) -> None:
        """Make later calls run `run`, a new rewrite of the same captured graph. Checkpoints recompute earlier forwards with the old one."""
        self._past.keep((self.run, self.reads))
        self.plan, self.run, self.module, self.reads, self.refused = plan, run, module, reads, refused

    def call(self, inputs: tuple[Any, ...], forward: int) -> Any:
        """Run the graph on `inputs`, the inputs of its captured code, and return its results.

        In fp16, the model's first calls run the graph in fp32 as well, to find values that would overflow (`LookAhead`). `forward` numbers
        the calls of the model.
        """
        first = self.look_ahead
        with closed_if_raised() if self.enters_regions else contextlib.nullcontext():
            result = self.call_steady(inputs) if first is None else first.call(self.call_steady, inputs, forward)
        if first is not None and first.left < 0:
            self.look_ahead = None
        return result

    def call_steady(self, inputs: tuple[Any, ...]) -> Any:
        """Run the graph under the user's dispatch modes, and return its results. If the graph scales gradients, pass the loss scale to it.

        If no values are observed (`look_ahead` is None) and the graph enters no context such as `torch.no_grad()` (`enters_regions` is
        False), `call` only calls this method, and callers may use this method instead.
        """
        run, reads, scaled, given = self.run, self.reads, self.latest, inputs
        if self._past.before:
            run, reads = self._past.of_forward((run, reads))
        for check in self.checks.graphs:
            check(reads, self.place)
        if scaled is not None:
            learning, fed = scaled.taking_gradients(inputs)
            forward = self.training.forward_scale(self.device, len(learning) > 0)
            if fed or not all(map(_IS_LEAF, learning)):
                forward.copy_scale()
            inputs = (*inputs, *forward.on(self.device))
            scaled.keep(inputs)
            if self.training.probe.armed and not recording(self.device):
                run = self._watched
        modes = suspend_dispatch_modes.modes
        if not modes:
            results = run(*inputs)
        else:
            with pushed(modes):
                results = run(*inputs)
        if self.keep_high is not None:
            self._first_is_over(given)
        if scaled is not None:
            watched = results if isinstance(results, tuple | list) else (results,)
            forward.watch(watched, learning, fed)
            self.training.gate.await_backward(watched, [*map(id, learning)])
        return results

    def _first_is_over(self, inputs: tuple[Any, ...]) -> None:
        """End the first call, which ran op by op. If ops raised errors on low operands, plan the graph anew with these ops in fp32.
        Otherwise let later calls run the graph as emitted."""
        keep_high, self.keep_high = self.keep_high, None
        if self.refused and keep_high is not None:
            keep_high(self.refused, inputs)
        elif isinstance(self.run, FirstRun):
            self.run = self.run.later

    def _watched(self, *inputs: Any) -> Any:
        """Run the graph op by op to find its first non-finite result or gradient. Used from an overflow until a training step is finite."""
        assert self.module is not None
        return self.training.probe.run(self.plan, self.module, inputs)


class State(threading.local):
    """The state of the calls of one rewritten model in this thread.

    An entry is a module that is called from outside of the model's graphs, such as the root. A region is a rewritten graph.
    """

    def __init__(self) -> None:
        self.depth = 0
        """Number of calls of the model and its submodules that run now, one inside another. Calls inside captured graphs do not count."""
        self.transformed = 0
        """Number of running calls that run as written inside a torch.func transform or forward-mode AD."""
        self.generating = 0
        """Number of running calls of `generate()`."""
        self.captured = 0
        """Number of running calls of modules that run as captured graphs, not as written."""
        self.ran: list[Region] = []
        """Regions that the innermost running call has run so far."""
        self.entry: str | None = None
        """Which module was called from outside, by its key in `GraphRewriter.entries`; None if no call runs."""
        self.forwards = 0
        """Number of outermost calls that have begun, without recomputations."""
        self.given_up = 0
        """Number of frames (calls of Python functions) that Dynamo had given up capturing when the outermost call began."""
        self.failures: list[Failure] = []
        """Code that Dynamo failed on in the innermost running call."""
        self.check: CaptureCheck | None = None
        """Compares the graph that the running call captures with the original model; None if the call is not checked."""
        self.around = 0
        """Number of torch.autocast regions around the outermost call, or around the recomputation that runs in it."""
        self.recomputed: tuple[int, int] | None = None
        """Id (`asking_number()`) of the running recomputation by a non-reentrant checkpoint; None if there is none."""

        self.low_caches: LowCaches | None = None
        """The low caches of the innermost running call of `generate()`; None if its caches stay fp32."""

    def regions_around(self) -> int:
        """Return the number of torch.autocast regions around the outermost call, or around the recomputation that runs inside that call."""
        return self.around

    @contextlib.contextmanager
    def recomputes(self, asked: tuple[int, int] | None, around: int) -> Iterator[None]:
        """Context manager that records a recomputation by a checkpoint, in a backward that a running forward of the model starts.

        `asked` is the id of the recomputation (`asking_number()`); None if no non-reentrant checkpoint makes the call. `around` is the
        number of torch.autocast regions around the call. A non-reentrant checkpoint enters such regions to restore the autocast state of
        its forward. So if `asked` is not None, all these regions count as the caller's, not as the model's own.
        """
        outer = self.recomputed, self.around
        self.recomputed, self.around = asked, self.around if asked is None else around
        try:
            yield
        finally:
            self.recomputed, self.around = outer

    @contextlib.contextmanager
    def generates(self, low_caches: LowCaches | None) -> Iterator[None]:
        """Context manager for a call of `generate()`: its steps are captured with dynamic sizes. At the end, `low_caches` become fp32."""
        outer = self.low_caches
        self.generating, self.low_caches = self.generating + 1, low_caches
        try:
            yield
        finally:
            self.generating, self.low_caches = self.generating - 1, outer
            if low_caches is not None:
                low_caches.end()


@dataclass
class CallRecord:
    """The options of one rewritten model, the state of its calls, and the notes and warnings about them."""

    options: Options
    root: nn.Module
    state: State = field(default_factory=State)
    calls: dict[tuple[Region, ...], None] = field(default_factory=dict)
    """Each key holds the rewritten graphs that a call of the model ran, each graph once, in order. Calls that ran the same graphs share a
    key. Cleared when graphs are captured anew."""
    last: tuple[Region, ...] = ()
    """The rewritten graphs that the latest call of the model ran."""
    unreadable: list[Skipped] = field(default_factory=list)
    """Modules that Dynamo can never capture, such as TorchScript modules, each with the reason."""
    notes: dict[str, None] = field(default_factory=dict)
    """Keys: the notes for the plan, in the order in which they were made."""
    warned: set[str] = field(default_factory=set)
    """Causes of warnings already given."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    plain: Callable[[], nn.Module] = field(default=nn.Module)
    """Function that returns a clone of the model without the rewrite, with the same parameters."""

    @property
    def runs_recurrent_eagerly(self) -> bool:
        """True if each LSTM, GRU and RNN module gets a separate graph that is not compiled: a compiler would unroll its time steps.

        False with the backend "eager": it compiles nothing, so these modules need no separate graph. Also False if `strict` allows only one
        graph, or if the user gave a plan that has no separate graph for such a module.
        """
        if self.options.backend == "eager" or self.options.strict:
            return False
        modules = dict(self.root.named_modules())
        given = self.options.given
        return given is None or any(isinstance(modules.get(region.entry), nn.RNNBase) for region in given.regions)

    def note(self, text: str) -> None:
        self.notes[text] = None

    def cannot_read(self, path: str, why: str) -> None:
        """List the module at `path` in `plan.skipped`, because no capture can ever read it, and warn. `why` is the reason.

        Raises CaptureError under `strict`.
        """
        if Skipped(path, why) not in self.unreadable:
            self.unreadable.append(Skipped(path, why))
        self.warn_fp32(f"{type(self.root).__name__}.{path} runs in fp32: {why}", why)

    def warn_fp32(self, message: str, cause: str = "") -> None:
        """Warn that code runs in fp32, once for each `cause`; under `strict` raise CaptureError(message). Do nothing if `message` is ""."""
        if self.options.strict and message:
            raise CaptureError(message)
        self.warn_once(message, cause)

    def warn_once(self, message: str, cause: str = "") -> None:
        """Warn with `message`, unless it is "" or this session warned of the same `cause` before. The default cause is `message`."""
        if message and (cause or message) not in self.warned:
            self.warned.add(cause or message)
            warnings.warn(message, AmpRewriteWarning, stacklevel=2)

    def forget_calls(self) -> None:
        """Clear `calls`, the graphs that earlier calls ran. Used if graphs are replaced, so that the plan does not list replaced graphs."""
        with self.lock:
            self.calls.clear()
