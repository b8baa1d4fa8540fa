"""Compile a function with a new Dynamo cache, find out when Dynamo silently runs the original code instead, and suspend the user's dispatch
modes while Dynamo works.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.utils import counters
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

from amprewrite.graphs.fx.read.names import AROUND, frame_around, frame_around_object
from amprewrite.graphs.fx.uncaptured import not_selective, unselected
from amprewrite.graphs.fx.weights.frozen_weight import FrozenWeight
from amprewrite.graphs.log_quiet import Unlogged, has_logger
from amprewrite.ir.pass_base import no_collection
from amprewrite.runtime.ambient.low_cache import shared_sizes
from amprewrite.runtime.compiler.dynamo_failures import Failure, Listener, Unseen, failure_of, unseen
from amprewrite.runtime.compiler.heard import (
    breaking_at_gradients,
    breaking_at_hooks,
    recurrent_layers_whole,
    regions_around,
    replaced,
    reporting_autocast_on,
    sharing_sizes,
    warnings_after_graphs,
)
from amprewrite.runtime.compiler.plain_words import DISABLE_REASON, ambient_autocast, plain_reason
from amprewrite.runtime.weights.half_values import TwoDtypes
from amprewrite.tables.boundary.members import modules_in, parameters_in
from amprewrite.tables.errors import CaptureError
from amprewrite.tables.extras import load_extra
from amprewrite.torch_internals.dispatch import disable_dispatch_modes, dispatch_modes, is_any_autocast_enabled, tracing_context
from amprewrite.torch_internals.dynamo import skip_code, skip_once

EXACT = "inductor-exact"
"""Name of the backend in which inductor computes the same numbers as eager code."""
RECOMPILE_LIMIT = 64
"""Largest number of graphs that Dynamo captures of one function, such as for several shapes. Calls that fit none run as written."""

_ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters
"""True if torch.compile takes a recompile limit for one function; in earlier versions the limit is one setting of the process."""
_PYTHON = os.__file__.removesuffix("os.py")
_PACKAGES = tuple(f"{_PYTHON}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
RECURRENT = "capture stops at LSTM, GRU and RNN modules"
"""Our text for the reason of a graph break at an LSTM, GRU or RNN module. It replaces Dynamo's text."""
RUNS_RECURRENT = "LSTM, GRU and RNN modules run low in graphs of their own, which no compiler gets: it would unroll them over time"
"""Note in the plan of a model with LSTM, GRU or RNN modules, if its backend is a compiler."""
_RECURRENT = "RNN, GRU, or LSTM"
"""Words by which Dynamo's reason for a graph break at such a module is recognised. Since torch 2.15 they are not in its first line."""
_WAS_THERE = (AttributeMutationExisting, ValueMutationExisting)
"""Dynamo's classes for changes of objects that existed before the captured code ran."""
COUNTS_FROM = 4
"""Number of calls that capture a graph, after which Dynamo no longer treats int attributes of modules as constants of a graph.

Calls are counted, not graphs: an int that differs from layer to layer stays a constant, because one call captures all layers.
"""
ONE_EXPORT = threading.RLock()
"""Lock that is held while torch.export or torch.onnx.export runs, and while an export is planned.

Both exporters keep state that all threads share, so two exports at once would fail. For example, `torch.compiler.is_exporting()` is true in
all threads. Then functions that Dynamo skips annotate the exported graph (`torch.fx.traceback.annotate`), even in other threads.
"""


def compile_afresh(
    function: Callable[..., Any], backend: Callable[..., Any], whole: bool, root: nn.Module, note: Callable[[str], None] | None = None,
    recurrent: bool = True, failed: Callable[[Failure], None] = lambda _: None, beside_hooks: bool = False, hooks_differ: bool = True,
    no_graph: Callable[[bool], None] = lambda _: None, around: Callable[[], int] = regions_around, eager: bool = False,
    starts_again: Callable[[Any], bool] = lambda _: False,
) -> Callable[..., Any]:  # fmt: skip
    """Return a clone of `function`, a forward in the model `root`. Dynamo compiles the clone anew, even if it skipped `function` before.

    Errors of `backend` reach the caller unchanged. torch.compile has no arguments for the settings below. They are on only while Dynamo
    converts a frame, so that a call of a captured graph does not pay for them:

    1. LSTM, GRU and RNN modules are captured if `recurrent`; otherwise they break the graph.
    2. Calls of loggers are left out of graphs, as in torch.export. A message about it is passed to `note`.
    3. NumPy's random numbers break a graph, because a graph would draw them from PyTorch's generator instead of NumPy's.
    4. After COUNTS_FROM calls that captured graphs, int attributes of modules are no longer constants: the model may increment them.
    5. Code that Dynamo fails on runs as written, and `failed` is called with the failure. If `whole`, Dynamo raises an error instead.
    6. `no_graph` is called if Dynamo makes no graph of `function`'s own code. Its argument is True if all of the code was read and has no
       tensor op, as in nn.Identity. It is False if Dynamo gave up the code, or broke the graph at a function disabled for Dynamo.
    7. If `hooks_differ`, Dynamo guards on module hooks, because code captured for one module runs for all modules of its class.
    8. `torch.is_autocast_enabled()` returns True to an fp32 model's code, except in autocast regions of the model itself (`heard.py`).
       `around()` returns the number of autocast regions that are open around the model's call. These are not the model's own.
    9. Dynamo limits the number of graphs of one piece of code. If several models run the same code, only this model's graphs count.
    10. If `eager`, graphs run without a compiler. Then `torch.autograd.grad` breaks the graph, and Dynamo also captures the code after
        the break. With a compiler, Dynamo leaves the whole function uncaptured.
    11. Functions of Python's own library run as written, because they contain no ops. The functions that they call are converted.
    12. Code of a compiler runs as written. Dynamo meets it if a forward runs a backward, because a backward is compiled when it first runs.
    13. `starts_again` gets the local variables of a call. If it returns True, the call can begin again with its half inputs cast to fp32:
        if an op refuses its operands, or if code asks whether autocast is on, TwoDtypes is raised before `function` runs.
    14. Before torch 2.13 a hook on a tensor that the code computes breaks the graph: a captured hook would miss some gradients.
    15. Warnings of PyTorch's own code break no graph. They are given when the graph has run.

    If `beside_hooks`, graphs do not depend on which global module hooks exist.
    """
    frozen = any(isinstance(each, FrozenWeight) for each in parameters_in(root))
    filters = [*([_without_global_hooks] if beside_hooks else []), *([_without_stored_weights] if frozen else [])]
    filtered: dict[str, Any] = {"guard_filter_fn": _all_of(filters)} if filters else {}
    isolated = {"isolate_recompiles": True, "recompile_limit": RECOMPILE_LIMIT} if _ISOLATES else {}
    given = unseen(backend)
    context = torch._dynamo.optimize(backend=given, nopython=whole, **isolated, **filtered)
    settings: dict[str, Any] = {"use_numpy_random_stream": True} | ({} if _ISOLATES else {"recompile_limit": RECOMPILE_LIMIT})
    settings["record_runtime_overhead"] = False  # do not mark Dynamo's overhead in profiles: the marks cost 3 us in each call
    if hooks_differ:
        settings["skip_nnmodule_hook_guards"] = False
    classes = set(map(type, modules_in(root)))
    if recurrent and any(issubclass(cls, nn.RNNBase) for cls in classes):
        settings["allow_rnn"] = True
    if any(has_logger(base.__module__) for cls in classes for base in cls.__mro__):
        settings["ignore_logging_functions"] = Unlogged(torch._dynamo.config.ignore_logging_functions, note)
    calls_that_captured, captured = 0, False

    def with_settings(convert: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(convert)  # copies the attributes by which Dynamo recognises the backend of a compiled function
        def convert_with_settings(*frame: Any, **state: Any) -> Any:
            file = frame[0].f_code.co_filename
            of_python = file.startswith((_PYTHON, "<frozen ")) and not file.startswith(_PACKAGES)  # _PACKAGES lie inside _PYTHON
            if frame[0].f_code is not code and (frame_id() is not None or of_python):
                return skip_once()
            with compile_lock:  # all threads share the functions that are replaced below and, before torch 2.12, Dynamo's config
                return convert_locked(frame, state)

        def convert_locked(frame: tuple[Any, ...], state: dict[str, Any]) -> Any:
            nonlocal captured
            graphs, own, breaks = counters["stats"]["unique_graphs"], frame[0].f_code is code, _breaks_at_disabled()
            now = dict(settings)
            if own:  # by default Dynamo never reads code again in which it found no op, but after eval() or under no_grad it may have some
                now["allow_empty_graphs"] = True
            if calls_that_captured >= COUNTS_FROM:
                now["allow_unspec_int_on_nn_module"] = True
            if not whole:  # Dynamo refuses this setting together with fail_on_recompile_limit_hit, which the user may have set
                now["suppress_errors"] = not torch._dynamo.config.fail_on_recompile_limit_hit
            if not _ISOLATES and (more := _entries_of_others(frame[1], given)):
                now["recompile_limit"] = RECOMPILE_LIMIT + more
                now["accumulated_recompile_limit"] = torch._dynamo.config.accumulated_recompile_limit + more
            gradients, shared = breaking_at_gradients() if eager else contextlib.nullcontext(), sharing_sizes(shared_sizes)
            hooks, layers, told = breaking_at_hooks(), recurrent_layers_whole(), warnings_after_graphs()
            quick = no_collection() if eager else contextlib.nullcontext()  # a compiler may run for minutes: it needs the collector
            again = own and starts_again(frame[0].f_locals)
            if again:  # let Dynamo raise errors, so that the call starts again before its code has run
                now["suppress_errors"] = False
            reporting = reporting_autocast_on(root, frame[0].f_locals, around(), again)
            try:
                with torch._dynamo.config.patch(now), Listener(failed), reporting, gradients, shared, hooks, layers, told, quick:
                    made = convert(*frame, **state)
                if own and counters["stats"]["unique_graphs"] == graphs:
                    no_graph(made.guarded_code is not None and _breaks_at_disabled() == breaks)
                return made
            except Exception as error:
                if again and failure_of(error).of_op:
                    raise Unseen(TwoDtypes()) from error
                raise
            finally:
                captured = captured or counters["stats"]["unique_graphs"] != graphs

        return convert_with_settings

    convert = getattr(context, "callback", None)
    if callable(convert):  # `convert` is None if Dynamo is disabled
        context.callback = with_settings(convert)  # type: ignore[union-attr]
    clone = clone_code(function)
    code = getattr(getattr(clone, "__func__", clone), "__code__", None)
    compiled: Callable[..., Any] = context(clone)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls_that_captured, captured
        try:
            return compiled(*args, **kwargs)
        except Unseen as carried:
            raise carried.error from carried.error.__cause__
        finally:
            if captured:
                calls_that_captured, captured = calls_that_captured + 1, False

    return call


def _breaks_at_disabled() -> int:
    """Return how often Dynamo has broken a graph at a call of a disabled function. Functions that this package disabled do not count."""
    return sum(count for why, count in counters["graph_break"].items() if "disable()" in why and DISABLE_REASON not in why)


def _entries_of_others(entry: Any, backend: Any) -> int:
    """Return how many graphs in Dynamo's cache of a code object were made by other backends than `backend`.

    `entry` is the first entry of this cache, a linked list.
    """
    count = 0
    while entry is not None:
        count, entry = count + (entry.backend is not backend), entry.next
    return count


def _all_of(filters: Sequence[Callable[[Sequence[Any]], list[bool]]]) -> Callable[[Sequence[Any]], list[bool]]:
    """Return a guard filter that keeps the guards that all `filters` keep. A guard filter returns a bool for each guard."""

    def keep(guards: Sequence[Any]) -> list[bool]:
        return [all(kept) for kept in zip(*(each(guards) for each in filters), strict=True)]

    return keep


def _without_stored_weights(guards: Sequence[Any]) -> list[bool]:
    """Guard filter that drops guards on the stored tensors and on the metadata of a FrozenWeight. Returns a bool for each guard.

    A FrozenWeight looks like an fp32 tensor and stores low values. Guards on the fp32 tensor are kept. The dropped guards run Python code
    in every call, 20 us for each weight, and are not needed, because a graph reads the stored tensors anew in every run.
    """
    inside = tuple(f"{guard.name}." for guard in guards if isinstance(guard.value, FrozenWeight))
    own = [isinstance(guard.value, FrozenWeight) and guard.guard_type == "TENSOR_SUBCLASS_METADATA_MATCH" for guard in guards]
    return [not (metadata or guard.name.startswith(inside)) for metadata, guard in zip(own, guards, strict=True)]


def _without_global_hooks(guards: Sequence[Any]) -> list[bool]:
    """Guard filter that drops guards on the tables of global module hooks. Returns a bool for each guard: True to keep it.

    Dynamo guards on the keys of these tables, even if the code only tests whether a table is empty. Each registration has a new key, so
    that such a guard fails. A guard on a hook itself shows that the graph contains the hook. All guards are kept in this case.
    """
    on_hooks = [_GLOBAL_HOOKS.search(guard.name) for guard in guards]
    if any(found and (found[1] or guard.guard_type not in _ASKS) for found, guard in zip(on_hooks, guards, strict=True)):
        return [True] * len(guards)
    return [found is None for found in on_hooks]


_GLOBAL_HOOKS = re.compile(r"\._global_\w+hooks\w*(?:\[[^\]]*\])?(.*)$")
_ASKS = ("TYPE_MATCH", "SEQUENCE_LENGTH", "DICT_LENGTH", "DICT_KEYS_MATCH", "DICT_CONTAINS", "DICT_VERSION", "BOOL_MATCH")
"""Kinds of guards that only test a table of hooks or a type, not a hook itself."""


def clone_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of `function` with a new code object, for which Dynamo has stored no graphs and no mark to skip the code.

    Dynamo skips the files of PyTorch's own modules. A forward from such a file is wrapped in a function of ours, which Dynamo captures.
    An object that is no Python function, such as a `functools.partial`, is wrapped, too. Otherwise Dynamo would use one code object
    for all such objects of the process, and it captures at most 256 graphs of one code object.
    """
    inner = function.__func__ if isinstance(function, types.MethodType) else function
    if not isinstance(inner, types.FunctionType):
        return with_own_code(frame_around_object(function))
    if torch._dynamo.trace_rules.check(inner):
        inner = frame_around(inner)
    copy = with_own_code(inner)
    return types.MethodType(copy, function.__self__) if isinstance(function, types.MethodType) else copy


def with_own_code(inner: Any) -> Callable[..., Any]:
    """Return a copy of the function `inner` with a new code object, for which Dynamo has no cached graph and no mark to skip it."""
    copy = types.FunctionType(inner.__code__.replace(), inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__, copy.__qualname__, copy.__module__ = inner.__kwdefaults__, inner.__qualname__, inner.__module__
    return copy


def is_whole(module: torch.fx.GraphModule, function: Callable[..., Any]) -> bool:
    """True if a captured graph is all of `function`: it ends at a return statement of `function` itself, not of an inner function."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or reason.graph_break or not reason.user_stack:
        return False
    inner = function.__func__ if isinstance(function, types.MethodType) else function
    at = reason.user_stack[0]
    codes = [code for code in (getattr(inner, "__code__", None), *AROUND) if code is not None]
    return any(
        (at.filename, at.name) == (code.co_filename, code.co_name) and at.lineno in {line for *_, line in code.co_lines()} for code in codes
    )


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of a bound method or function; () if it has no signature."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def lookup_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the backend with this name; a callable is returned unchanged."""
    if callable(backend):
        return backend
    if backend == EXACT:
        return load_extra("exact rounding", f"backend={EXACT!r}").compile_exactly  # type: ignore[no-any-return]
    return torch._dynamo.backends.registry.lookup_backend(backend)  # type: ignore[no-any-return]


_ROUNDINGS: dict[Any, str] = {
    "inductor": "inductor keeps fp32 inside its kernels, where the plan rounds: its results differ from eager code's by that; "
    f"backend={EXACT!r} gives the same numbers with fewer fusions",
    EXACT: "inductor fuses only what gives eager code's numbers: results are rounded where the plan says",
}


def rounding_of(backend: str | Callable[..., Any]) -> str:
    """Return a note on whether code compiled by `backend` rounds values where the plan says; "" if this is not known."""
    return _ROUNDINGS.get(backend, "") if isinstance(backend, str) else ""


def frame_id() -> int | None:
    """Return the number of the frame that Dynamo is capturing; None if it captures none."""
    compiling = torch._guards.CompileContext.current_compile_id()
    return None if compiling is None else compiling.frame_id


ASKED_FOR = ("RecompileError", "FailOnRecompileLimitHit")
"""Names of errors that Dynamo raises only if a setting of the user asks for them."""


def reading() -> Any:
    """Return the InstructionTranslator by which Dynamo is reading code now; None if it reads none."""
    return getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)


def wants_one_graph() -> bool:
    """True if Dynamo is capturing a graph that it may not break, as for `fullgraph=True`."""
    now = reading()
    return now is not None and bool(now.one_graph or now.error_on_graph_break)


def inputs_to_hook() -> set[str]:
    """Return the names of those inputs of the graph under capture on which the model sets hooks.

    Dynamo registers these hooks only after the graph has run. If the graph overwrites such an input, the hook is set on the new value.
    """
    now = reading()
    hooks = () if now is None else now.output.side_effects.tensor_hooks.values()
    return {tensor.as_proxy().node.name for tensor, *_ in hooks}


def changes_objects() -> bool:
    """True if the code under capture changes an existing object or hooks a tensor. Dynamo does both only after the graph has run."""
    effects = reading().output.side_effects
    there = (each for each in effects.id_to_variable.values() if isinstance(each.mutation_type, _WAS_THERE))
    return bool(effects.tensor_hooks) or any(effects.is_modified(each) for each in there)


# -- autocast, dispatch modes and captures that are active around a call -----------------
def refuse_ambient_autocast() -> None:
    """Raise CaptureError inside a torch.autocast region, which would add casts that are not in the plan."""
    if is_any_autocast_enabled():
        raise CaptureError(ambient_autocast())


def user_modes() -> list[Any]:
    """Return the active dispatch modes of this thread, outermost first."""
    return [mode for mode in dispatch_modes() if mode is not None]


def at_work() -> bool:
    """True if Dynamo is capturing now, or would capture a function that is called now."""
    return tracing_context() is not None or get_eval_frame_callback() is not None


def kept_out() -> bool:
    """True if Dynamo would not capture a function that is called now, although no setting switches Dynamo off.

    This is true, for example, inside a function that `torch.utils.checkpoint` runs uncaptured.
    """
    return not at_work() and not why_switched_off()


def never_read(function: Callable[..., Any]) -> None:
    """Make Dynamo never capture `function`. Use this for a function that reads Dynamo's state: a capture would change that state."""
    skip_code(function.__code__)


never_read(at_work)
never_read(kept_out)


# -- whether Dynamo is switched off, and why it did not capture code ---------------------
def disabled() -> bool:
    """True if Dynamo is disabled by a setting or the environment, so that torch.compile returns functions uncompiled."""
    return torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE", "") == "1"


def why_switched_off() -> str:
    """Return a message that names the switch that keeps Dynamo from capturing, with the remedy; "" if no switch is set."""
    if disabled():
        return "Dynamo is disabled (TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE or torch._dynamo.config.disable); enable it"
    stance = torch._dynamo.eval_frame._stance.stance
    if stance != "default":
        return f"torch.compiler.set_stance({stance!r}) tells Dynamo to run the original code; call the model outside of it"
    return ""


_READ: list[dict[str, int]] = [{}]
"""One item: the dict that `reasons` returned last, and returns again if nothing changed. A list, so that the item can be replaced."""


def frames_given_up() -> int:
    """Return the number of frames that Dynamo has given up in this process, and that ran as written. A frame under capture counts, too."""
    frames = counters["frames"]
    return frames["total"] - frames["ok"]


def reasons() -> dict[str, int]:
    """Return Dynamo's reasons so far for code that it cannot capture, each with its count.

    The same dict object is returned until Dynamo gives a further reason.
    """
    if dict.__ne__(counters["unimplemented"], _READ[0]):  # `dict.__ne__`, because `Counter.__ne__` is written in Python and slow
        _READ[0] = dict(counters["unimplemented"])
    return _READ[0]


def new_reasons(before: dict[str, int]) -> tuple[str, ...]:
    """Return the first lines of the reasons that Dynamo gave since `before`, a result of `reasons()`."""
    new = [text for text, count in reasons().items() if count > before.get(text, 0)]
    return tuple(dict.fromkeys(first_line(text) for text in new))


def first_line(text: object) -> str:
    """Return the first line of a message of Dynamo, in plain words; RECURRENT for a message about an LSTM, GRU or RNN module."""
    return RECURRENT if _RECURRENT in str(text) else plain_reason(str(text).strip().partition("\n")[0].strip())


class _Aside(threading.local):
    """Holds the user's dispatch modes that are suspended in this thread while Dynamo runs, because it cannot run under dispatch modes.

    Rewritten graphs run under these modes. Code that runs as written between graphs does not.
    """

    def __init__(self) -> None:
        self.modes: list[Any] = []


suspend_dispatch_modes = _Aside()


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Context manager that suspends the user's dispatch modes, so that Dynamo can run. Rewritten graphs still run under them."""
    with replaced(suspend_dispatch_modes, "modes", suspend_dispatch_modes.modes + user_modes()), disable_dispatch_modes():
        yield


@contextmanager
def unselective() -> Iterator[None]:
    """Context manager for a trial run of a graph: hide it from selective checkpoints, which would otherwise keep its results."""
    with replaced(suspend_dispatch_modes, "modes", not_selective(suspend_dispatch_modes.modes)), unselected():
        yield
