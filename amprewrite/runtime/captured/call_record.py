"""Record the calls of one rewritten model: the graphs that ran, the code that ran as written, notes for the plan, and warnings given."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import nn

from amprewrite.ir.plans.plan import Skipped
from amprewrite.runtime.ambient.low_cache import LowCaches
from amprewrite.runtime.captured.region import Region
from amprewrite.runtime.compiler.capture_check import CaptureCheck
from amprewrite.runtime.compiler.dynamo_failures import Failure
from amprewrite.runtime.options import Options
from amprewrite.tables.errors import AmpRewriteWarning, CaptureError


class State(threading.local):
    """The state of the calls of one rewritten model in this thread.

    An entry is a module that is called from outside of the model's graphs, such as the root. A region is a rewritten graph.
    """

    def __init__(self) -> None:
        self.depth = 0
        """Number of calls of the model and its submodules that run now, one inside another. Calls inside captured graphs do not count."""
        self.transformed = 0
        """Number of running calls inside a torch.func transform or a level of forward-mode derivatives."""
        self.generating = 0
        """Number of running calls of `generate()`."""
        self.captured = 0
        """Number of running calls of modules that run as captured graphs, not as written."""
        self.ran: list[Region] = []
        """Regions that the innermost running call has run so far."""
        self.entry: str | None = None
        """Key, in the `entries` of the GraphRewriter, of the module that the outermost running call calls; None if no call runs."""
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
        """`asking_number()` of the checkpoint recomputation that runs now, as the outermost call or inside it; None if there is none."""

        self.low_caches: LowCaches | None = None
        """The low caches of the innermost running call of `generate()`; None if its caches stay fp32."""

    def regions_around(self) -> int:
        """Return the number of torch.autocast regions around the outermost call, or around the recomputation that runs in it."""
        return self.around

    @contextlib.contextmanager
    def recomputes(self, asked: tuple[int, int] | None, around: int) -> Iterator[None]:
        """Context manager for a call inside a running forward. A forward that itself takes gradients may recompute a checkpoint in it.

        `asked`: the `asking_number()` of the recomputation; None in any other call. `around`: the number of torch.autocast regions around
        the call. In a recomputation all of them count as regions around the model, not as the model's own, because the checkpoint enters
        regions to restore the autocast state of its forward.
        """
        outer = self.recomputed, self.around
        self.recomputed, self.around = asked, self.around if asked is None else around
        try:
            yield
        finally:
            self.recomputed, self.around = outer

    @contextlib.contextmanager
    def generates(self, low_caches: LowCaches | None) -> Iterator[None]:
        """Context manager for a call of `generate()`: sizes are captured as dynamic, and `low_caches` store keys and values low."""
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
        """True if each LSTM, GRU and RNN module gets an eager graph of its own.

        This holds for every backend but "eager", unless `strict` is set. If a plan was given, it must also have a region for such a module.
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
        """Raise CaptureError(message) under `strict`; otherwise warn once for each `cause`. Do nothing if `message` is ""."""
        if self.options.strict and message:
            raise CaptureError(message)
        self.warn_once(message, cause)

    def warn_once(self, message: str, cause: str = "") -> None:
        """Warn with `message`, unless it is "" or this session warned of the same `cause` before. The default cause is `message`."""
        if message and (cause or message) not in self.warned:
            self.warned.add(cause or message)
            warnings.warn(message, AmpRewriteWarning, stacklevel=2)

    def forget_calls(self) -> None:
        """Clear `calls`, because graphs of earlier calls are replaced."""
        with self.lock:
            self.calls.clear()
