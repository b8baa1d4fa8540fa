"""What a rewritten model does at every call: run its rewritten graphs, and know whether they ran.

Dynamo captures, guards and dispatches; this file is its backend, and the guard around it that turns its silent detours
(a dispatch mode, a frame it skips, the recompile limit, a switch in the environment) into a working call or a clear word.
"""

from __future__ import annotations

import inspect
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from amprewrite.backends.nn_module import CompiledFn, emit
from amprewrite.devices import best_format, device_row
from amprewrite.errors import AmpRewriteError, AmpRewriteWarning, CaptureError, PlanError
from amprewrite.formats import FP32, Format
from amprewrite.oplists import OpLists
from amprewrite.plan import CastPlan, RegionPlan, Skipped
from amprewrite.policy import Override, Policy
from amprewrite.rewrite_graph import _device, read_program, rewrite_graph
from amprewrite.weight_cache import WeightCache

RECOMPILE_LIMIT = 64
"""Graphs of one entry (modes, shapes, options) before Dynamo gives up and the call starts afresh."""

_COMPILE_TAKES = inspect.signature(torch.compile).parameters


@dataclass(frozen=True)
class Options:
    """The options of one `rewrite` call, checked."""

    low: Format | None
    """None: what the device does best, which may be nothing."""
    lists: str | OpLists = "default"
    overrides: tuple[Override, ...] = ()
    backend: str | Callable[..., Any] = "eager"
    cache_weights: bool = True
    strict: bool = False
    given: CastPlan | None = None


class Region:
    """One rewritten graph, as Dynamo calls it."""

    def __init__(self, session: Session, plan: RegionPlan, run: CompiledFn, left_out: Skipped | None) -> None:
        self.session, self.plan, self.run, self.left_out = session, plan, run, left_out

    def __call__(self, *inputs: Any) -> Any:
        state = self.session.state
        state.ran.append(self)
        if state.modes:
            with _entered(state.modes):
                return self.run(*inputs)
        return self.run(*inputs)


class Entry:
    """A module that may be called from outside: the root, or a part of it that somebody calls by itself."""

    def __init__(self, session: Session, path: str, function: Callable[..., Any]) -> None:
        self.session, self.path, self.function = session, path, function
        self.compiled: Callable[..., Any] = function
        self.names = parameter_names(function)
        self.arm()

    def arm(self) -> None:
        """Start afresh: a new code object and a new Dynamo cache, so that nothing skipped before stays skipped."""
        isolated = {"isolate_recompiles": True, "recompile_limit": RECOMPILE_LIMIT} if "isolate_recompiles" in _COMPILE_TAKES else {}
        self.compiled = torch.compile(  # type: ignore[call-overload]
            fresh_code(self.function), backend=self._backend, fullgraph=self.session.options.strict, **isolated
        )

    def _backend(self, module: torch.fx.GraphModule, example_inputs: list[Any]) -> CompiledFn:
        return self.session.rewrite_region(self, module, example_inputs)


class _State(threading.local):
    """Per thread: how deep we are in rewritten calls, which regions ran, and the user's dispatch modes set aside."""

    def __init__(self) -> None:
        self.depth = 0
        self.ran: list[Region] = []
        self.modes: list[Any] = []


@dataclass
class Session:
    """Everything one rewritten model keeps at run time."""

    options: Options
    root: nn.Module
    state: _State = field(default_factory=_State)
    entries: dict[str, Entry] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    calls: dict[tuple[int, ...], tuple[Region, ...]] = field(default_factory=dict)
    last: tuple[Region, ...] = ()
    left_out: dict[str, Skipped] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    cache: WeightCache = field(default_factory=WeightCache)
    hooks_seen: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    # -- calls -------------------------------------------------------------------
    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `entry` on its rewritten graphs, capturing them first where the inputs are new."""
        refuse_ambient_autocast()
        why_not = tracing_context()
        if why_not:
            raise CaptureError(f"a rewritten model cannot be traced by {why_not}")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.warn_fp32(f"this call ran in fp32: {_FUNCTORCH}")
            return entry.function(*args, **kwargs)
        self._notice_hooks()
        state = self.state
        outer = state.ran, state.modes
        state.ran, state.depth = [], state.depth + 1
        try:
            result = self._run(entry, args, kwargs)
            ran = state.ran
        finally:
            (state.ran, state.modes), state.depth = outer, state.depth - 1
        if ran:
            self._remember(ran)
        else:
            self._nothing_ran(entry)
        return result

    def _run(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if torch._C._len_torch_dispatch_stack() == 0:
                return entry.compiled(*args, **kwargs)
            self.state.modes = [mode for mode in _get_current_dispatch_mode_stack() if mode is not None]
            with _disable_current_modes():
                return entry.compiled(*args, **kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            inner = error.inner_exception
            entry.arm()
            if isinstance(inner, AmpRewriteError):
                raise inner from None
            raise
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.RecompileLimitExceeded) as error:
            entry.arm()
            first = str(error).strip().partition("\n\n")[0]
            raise CaptureError(f"strict=True, and the model cannot be captured whole: {first}") from error

    def _remember(self, ran: list[Region]) -> None:
        last = tuple(ran)
        if last != self.last:
            with self.lock:
                self.last = tuple(dict.fromkeys(last))
                self.calls.setdefault(tuple(id(region) for region in self.last), self.last)
                self._check_node_overrides()

    def _check_node_overrides(self) -> None:
        if any(override.scope == "node" for override in self.options.overrides):
            policy = Policy(self.options.low or FP32, overrides=self.options.overrides)
            policy.check_nodes(node.name for region in self.regions for node in region.plan.nodes)

    def _nothing_ran(self, entry: Entry) -> None:
        """Dynamo ran the original code. Say so, and give the next call a fresh start."""
        if torch._dynamo.config.disable:
            why = "Dynamo is disabled (TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE or torch._dynamo.config.disable); enable it"
        else:
            why = (
                "Dynamo captured no graph of it (a frame it skips, its recompile limit, or no tensor op inside); "
                "TORCH_LOGS=graph_breaks,recompiles tells which"
            )
            entry.arm()
        self.left_out[entry.path] = Skipped(entry.path or "the model", why)
        self.warn_fp32(f"{type(self.root).__name__}{'.' * bool(entry.path)}{entry.path} ran in fp32: {why}")

    def warn_fp32(self, message: str) -> None:
        """Raise under strict, else warn once."""
        if self.options.strict:
            raise CaptureError(message)
        if message not in self.warned:
            self.warned.add(message)
            warnings.warn(message, AmpRewriteWarning, stacklevel=4)

    def _notice_hooks(self) -> None:
        """Dynamo does not guard on hooks: start afresh where one came or went since the last capture."""
        seen = RemovableHandle.next_id
        if seen != self.hooks_seen:
            mark = hook_mark(self.root)
            if self.hooks_seen and mark != self._hook_mark:
                for entry in self.entries.values():
                    entry.arm()
            self.hooks_seen, self._hook_mark = seen, mark
            self._hooked = [d for d in _hook_dicts(self.root) if d]
        elif self._hooked and hook_mark(self.root) != self._hook_mark:
            self._hook_mark = hook_mark(self.root)
            for entry in self.entries.values():
                entry.arm()

    _hook_mark: tuple[int, ...] = ()
    _hooked: list[Any] = field(default_factory=list)

    # -- capture ---------------------------------------------------------------------
    def rewrite_region(self, entry: Entry, module: torch.fx.GraphModule, example_inputs: list[Any]) -> CompiledFn:
        """Dynamo's backend: decide, edit, emit. A graph that cannot be rewritten stays fp32 and says so; strict raises."""
        refuse_ambient_autocast()
        with self.lock:
            name = f"graph{len(self.regions)}"
            plan, run, left_out = self._rewritten(entry, module, example_inputs, name)
            reason = getattr(module, "compile_subgraph_reason", None)
            if reason is not None and reason.graph_break:
                where = reason.user_stack[-1] if reason.user_stack else None
                place = f"{where.filename}:{where.lineno} in {where.name}" if where else entry.path or "the model"
                self.left_out[place] = Skipped(place, f"graph break: {reason.reason.strip().splitlines()[0]}")
            region = Region(self, plan, run, left_out)
            self.regions.append(region)
        return region

    def _rewritten(
        self, entry: Entry, module: torch.fx.GraphModule, example_inputs: list[Any], name: str
    ) -> tuple[RegionPlan, CompiledFn, Skipped | None]:
        grad = torch.is_grad_enabled()
        policy = self.policy_for(_device(module))
        program = read_program(module, policy, name, entry.path, grad, entry.names)
        program.given = self._given(program)
        program.match_given = self._given if program.given is not None else None
        backend = None if self.options.backend == "eager" else lookup_backend(self.options.backend)
        cache = self.cache if self.options.cache_weights and not grad else None
        try:
            rewritten, plan = rewrite_graph(program)
            return plan, emit(rewritten, example_inputs, backend, cache), None
        except (PlanError, *([] if not self.options.strict else [Exception])):
            raise
        except AmpRewriteError as error:
            why = f"{type(error).__name__}: {error}"
            self.left_out[name] = Skipped(name, why)
            self.warn_fp32(f"{name} of {type(self.root).__name__} stays fp32: {why}")
            plan = RegionPlan(name, (), (), grad, (f"left in fp32: {why}",), entry.path)
            return plan, emit(module, example_inputs, backend, None), self.left_out[name]

    def _given(self, program: Any) -> RegionPlan | None:
        from amprewrite.given_plan import match_region

        return match_region(self.options.given, program) if self.options.given is not None else None

    def policy_for(self, device: str) -> Policy:
        """The policy on this device; notes say where the device gains nothing."""
        options, low = self.options, self.options.low
        row = device_row(device)
        if low is None:
            low = best_format(device)
            if low is None:
                self.notes[f"left in fp32: {row.name} gains nothing from low precision; dtype='bf16' rewrites all the same"] = None
        elif low is not FP32 and low.name not in row.low_formats:
            self.notes[f"{low.name} on {row.name}: done as asked, but its matrix units do not multiply {low.name} natively"] = None
        return Policy(low or FP32, options.lists, options.overrides, options.cache_weights, options.strict)

    # -- plan ---------------------------------------------------------------------------
    def plan_of(self, regions: tuple[Region, ...]) -> CastPlan:
        low = {self.policy_for(self._region_device()).low.name}
        lists = self.options.lists
        return CastPlan(
            low.pop(),
            tuple(part for index, region in enumerate(regions) for part in region.plan.flat(f"graph{index}")),
            tuple(self.left_out.values()),
            tuple(self.notes),
            lists if isinstance(lists, str) else lists.name,
        )

    def _region_device(self) -> str:
        tensors = (*self.root.parameters(), *self.root.buffers())
        return next((t.device.type for t in tensors), "cpu")


_FUNCTORCH = "torch.func transforms (vmap, grad, jvp) cannot run a captured graph; transform the original model instead"


def refuse_ambient_autocast() -> None:
    if torch._C._is_any_autocast_enabled():
        raise CaptureError(
            "a rewritten model was called inside torch.autocast: its casts are in the graph already, and autocast would add "
            "others that no plan shows; call it outside the autocast region"
        )


def tracing_context() -> str:
    """The tracer that is running, with what to use instead; "" where none is."""
    if torch.jit.is_tracing():
        return "torch.jit.trace; use amp.export_program(args)"
    if torch.compiler.is_exporting():
        return "torch.export; use amp.export_program(args)"
    for mode in _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else ():
        if mode is not None and type(mode).__name__ in ("ProxyTorchDispatchMode", "FunctionalTensorMode"):
            return "make_fx; use amp.export_program(args)"
        if type(mode).__name__ == "FakeTensorMode":
            return "a FakeTensorMode; run it on real tensors, or trace the original model"
    return ""


def lookup_backend(backend: str | Callable[..., Any]) -> CompiledFn:
    if callable(backend):
        return backend
    found: CompiledFn = torch._dynamo.backends.registry.lookup_backend(backend)
    return found


def fresh_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own: Dynamo's caches and skips hang on code objects."""
    inner = function.__func__ if isinstance(function, types.MethodType) else function
    if not isinstance(inner, types.FunctionType):
        return function
    copy = types.FunctionType(inner.__code__.replace(), inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__, copy.__qualname__, copy.__module__ = inner.__kwdefaults__, inner.__qualname__, inner.__module__
    return types.MethodType(copy, function.__self__) if isinstance(function, types.MethodType) else copy


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters after self; () where the signature says nothing."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _hook_dicts(root: nn.Module) -> Iterator[dict[int, Any]]:
    for module in root.modules():
        yield from (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)


def hook_mark(root: nn.Module) -> tuple[int, ...]:
    """Identifiers of all hooks below the root; its own run outside the captured graphs."""
    own = {id(d) for d in (root._forward_hooks, root._forward_pre_hooks, root._backward_hooks, root._backward_pre_hooks)}
    return tuple(key for d in _hook_dicts(root) if id(d) not in own for key in d)


@contextmanager
def _entered(modes: list[Any]) -> Iterator[None]:
    """Put the user's dispatch modes back while a rewritten graph runs."""
    entered = []
    try:
        for mode in modes:
            mode.__enter__()
            entered.append(mode)
        yield
    finally:
        for mode in reversed(entered):
            mode.__exit__(None, None, None)


@torch._dynamo.disable(  # type: ignore[misc]
    reason="a rewritten model compiles its own graphs; for one compiled graph pass backend='inductor' to amprewrite.rewrite"
)
def enter(session: Session, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The one door into a rewritten model; an outer torch.compile breaks its graph here instead of swallowing the model."""
    return session.call(session.entries[path], args, kwargs)


__all__ = ["Entry", "Options", "Region", "Session", "enter"]
