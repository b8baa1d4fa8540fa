"""Our knowledge of Dynamo: how to compile a function afresh, and when Dynamo quietly runs the original code instead."""

from __future__ import annotations

import functools
import inspect
import os
import re
import threading
import types
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.utils import counters
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

from amprewrite.graphs.fx.read.source_text import AROUND, frame_around
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.graphs.fx.weights.frozen_weight import FrozenWeight
from amprewrite.runtime.ambient.hook_watch import hook_node
from amprewrite.runtime.compiler.dynamo_failures import Failure, Listener, Unseen, unseen
from amprewrite.runtime.compiler.heard import regions_around, reporting_autocast_on
from amprewrite.runtime.compiler.plain_words import ambient_autocast, plain_reason
from amprewrite.runtime.compiler.unlogged import Unlogged, has_logger
from amprewrite.tables.boundary.members import parameters_in
from amprewrite.tables.errors import CaptureError
from amprewrite.tables.extras import load_extra
from amprewrite.torch_internals.dispatch import dispatch_modes, is_any_autocast_enabled, tracing_context
from amprewrite.torch_internals.dynamo import skip_code

EXACT = "inductor-exact"
"""The backend that has inductor compute eager code's numbers."""
RECOMPILE_LIMIT = 64
"""Graphs of one frame (modes, shapes, options). A call that fits none of them then runs as written."""

_ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters
"""Whether torch.compile takes a limit of its own; before it did, the limit was one setting for the process."""
RECURRENT = "Attempted to wrap RNN"
"""How Dynamo's reason begins where such a module breaks a graph."""
_WAS_THERE = (AttributeMutationExisting, ValueMutationExisting)
COUNTS_FROM = 4
"""Calls that captured something from which on ints in attributes are no constants. Ints that differ from layer to layer stay constants."""
ONE_EXPORT = threading.RLock()
"""Held while torch.export or torch.onnx.export runs: they keep state that all threads share, so that two at once fail."""


def compile_afresh(
    function: Callable[..., Any], backend: Callable[..., Any], whole: bool, root: nn.Module, note: Callable[[str], None] | None = None,
    recurrent: bool = True, failed: Callable[[Failure], None] = lambda _: None, beside_hooks: bool = False, hooks_differ: bool = True,
    no_graph: Callable[[bool], None] = lambda _: None, around: Callable[[], int] = regions_around,
) -> Callable[..., Any]:  # fmt: skip
    """`function` compiled with caches of its own, so that nothing Dynamo skipped before stays skipped.

    Settings that torch.compile does not take hold while Dynamo converts a frame, so that a call that finds its graph pays for none:
    LSTM, GRU and RNN modules are captured like others, unless `recurrent` is False: then they break the graph. Writing to
    a log breaks none: it is left out, as torch.export does, and noted. NumPy's random numbers break a graph, and NumPy draws them:
    Dynamo would draw them from PyTorch's generator. An int that a model counts up in an attribute becomes a number like others after
    COUNTS_FROM graphs.
    Code that Dynamo fails on runs as written, and `failed` hears of it; not if the graph must be `whole`. Where `function` itself has no
    graph, `no_graph` hears whether Dynamo read all of it: then there is no tensor op in it, as in `nn.Identity`. Code captured for one
    module runs for others of its class: by default Dynamo does not look whether they have its hooks, here it does if `hooks_differ`.
    The model is told that autocast is on (`heard.py`) outside of its own regions; `around` gives how many others are around the call.
    Errors of the backend reach the caller unchanged. With `beside_hooks` graphs do not depend on which hooks on all modules of
    the process there are.
    """
    frozen = any(isinstance(each, FrozenWeight) for each in parameters_in(root))
    filters = [*([_without_global_hooks] if beside_hooks else []), *([_without_stored_weights] if frozen else [])]
    filtered: dict[str, Any] = {"guard_filter_fn": _all_of(filters)} if filters else {}
    isolated = {"isolate_recompiles": True, "recompile_limit": RECOMPILE_LIMIT} if _ISOLATES else {}
    context = torch._dynamo.optimize(backend=unseen(backend), nopython=whole, **isolated, **filtered)
    settings: dict[str, Any] = {"use_numpy_random_stream": True} | ({} if _ISOLATES else {"recompile_limit": RECOMPILE_LIMIT})
    if hasattr(torch._dynamo.config, "record_runtime_overhead"):
        settings["record_runtime_overhead"] = False  # a mark in profiles that costs 3 us at each call
    if hooks_differ:
        settings["skip_nnmodule_hook_guards"] = False
    if recurrent and any(isinstance(module, nn.RNNBase) for module in root.modules()):
        settings["allow_rnn"] = True
    if any(has_logger(cls.__module__) for module in root.modules() for cls in type(module).__mro__):
        settings["ignore_logging_functions"] = Unlogged(torch._dynamo.config.ignore_logging_functions, note)
    calls_that_captured, captured = 0, False

    def with_settings(convert: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(convert)  # its attributes tell Dynamo which backend's graphs a call may run
        def convert_with_settings(*frame: Any, **state: Any) -> Any:
            nonlocal captured
            graphs, undo = counters["stats"]["unique_graphs"], []
            try:
                for name, value in settings.items():
                    undo.append(_set(name, value))
                if calls_that_captured >= COUNTS_FROM:
                    undo.append(_set("allow_unspec_int_on_nn_module", True))
                if own := frame[0].f_code is code:  # guards, so that another mode or argument is read anew
                    undo.append(_set("allow_empty_graphs", True))
                if not whole:  # a user may want errors: Dynamo takes one of the two
                    undo.append(_set("suppress_errors", not getattr(torch._dynamo.config, "fail_on_recompile_limit_hit", False)))
                with Listener(failed), reporting_autocast_on(root, frame[0].f_locals, around()):
                    made = convert(*frame, **state)
                if own and counters["stats"]["unique_graphs"] == graphs:
                    no_graph(made.guarded_code is not None)
                return made
            finally:
                for restore in reversed(undo):
                    restore()
                captured = captured or counters["stats"]["unique_graphs"] != graphs

        return convert_with_settings

    convert = getattr(context, "callback", None)
    if callable(convert):  # there is none where Dynamo is disabled
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


def _set(name: str, value: Any) -> Callable[[], None]:
    """Set a setting of Dynamo's, and give what sets it back. Where settings are context variables, one costs 0.3 us, not 8."""
    entry = getattr(torch._dynamo.config, "_config", {}).get(name)
    variable = getattr(entry, "user_override", None)
    if isinstance(variable, ContextVar) and getattr(entry, "alias", None) is None:
        return functools.partial(variable.reset, variable.set(value))
    before = getattr(torch._dynamo.config, name)
    setattr(torch._dynamo.config, name, value)
    return functools.partial(setattr, torch._dynamo.config, name, before)


def _all_of(filters: Sequence[Callable[[Sequence[Any]], list[bool]]]) -> Callable[[Sequence[Any]], list[bool]]:
    """Keeps the guards that all `filters` keep."""

    def keep(guards: Sequence[Any]) -> list[bool]:
        return [all(kept) for kept in zip(*(each(guards) for each in filters), strict=True)]

    return keep


def _without_stored_weights(guards: Sequence[Any]) -> list[bool]:
    """Which guards to keep: of a frozen weight those on the tensor that it seems to be, and none on what it stores.

    Those run Python code at every call, 20 us for a weight. A graph asks a weight what it stores whenever it runs.
    """
    inside = tuple(f"{guard.name}." for guard in guards if isinstance(guard.value, FrozenWeight))
    own = [isinstance(guard.value, FrozenWeight) and guard.guard_type == "TENSOR_SUBCLASS_METADATA_MATCH" for guard in guards]
    return [not (metadata or guard.name.startswith(inside)) for metadata, guard in zip(own, guards, strict=True)]


def _without_global_hooks(guards: Sequence[Any]) -> list[bool]:
    """Which guards to keep: none on the hooks on all modules, unless the captured code calls one of them.

    Dynamo notes their numbers where it only asks whether there are any, and every registration has a number of its own. Its
    other guards are of hooks in the graph.
    """
    on_hooks = [_GLOBAL_HOOKS.search(guard.name) for guard in guards]
    if any(found and (found[1] or guard.guard_type not in _ASKS) for found, guard in zip(on_hooks, guards, strict=True)):
        return [True] * len(guards)
    return [found is None for found in on_hooks]


_GLOBAL_HOOKS = re.compile(r"\._global_\w+hooks\w*(?:\[[^\]]*\])?(.*)$")
_ASKS = ("TYPE_MATCH", "SEQUENCE_LENGTH", "DICT_LENGTH", "DICT_KEYS_MATCH", "DICT_CONTAINS", "DICT_VERSION", "BOOL_MATCH")
"""Kinds of guards that see a table of hooks, or the type of one, and no more."""


def clone_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own: Dynamo's caches and skips hang on code objects.

    PyTorch's own modules stand in files that Dynamo skips; theirs get a frame of ours around them, which it does not.
    """
    inner = function.__func__ if isinstance(function, types.MethodType) else function
    if not isinstance(inner, types.FunctionType):
        return function
    if torch._dynamo.trace_rules.check(inner):
        inner = frame_around(inner)
    copy = types.FunctionType(inner.__code__.replace(), inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__, copy.__qualname__, copy.__module__ = inner.__kwdefaults__, inner.__qualname__, inner.__module__
    return types.MethodType(copy, function.__self__) if isinstance(function, types.MethodType) else copy


def is_whole(module: torch.fx.GraphModule, function: Callable[..., Any]) -> bool:
    """Whether a captured graph is all of `function`: Dynamo left it by a return, and not that of a function called inside."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or reason.graph_break or not reason.user_stack:
        return False
    inner = function.__func__ if isinstance(function, types.MethodType) else function
    at = reason.user_stack[0]
    codes = [code for code in (getattr(inner, "__code__", None), AROUND) if code is not None]
    return any(
        (at.filename, at.name) == (code.co_filename, code.co_name) and at.lineno in {line for *_, line in code.co_lines()} for code in codes
    )


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters after self; () if the signature says nothing."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def lookup_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """The compiler by its name. PolicyError if it is "inductor-exact" and this torch's inductor lacks a setting that it needs."""
    if callable(backend):
        return backend
    if backend == EXACT:
        exact = load_extra("exact rounding", f"backend={EXACT!r}")
        exact.check_inductor()
        return exact.compile_exactly  # type: ignore[no-any-return]
    found: Callable[..., Any] = torch._dynamo.backends.registry.lookup_backend(backend)
    return found


_ROUNDINGS: dict[Any, str] = {
    "inductor": "inductor keeps fp32 inside its kernels, where the plan rounds: its results differ from eager code's by that; "
    f"backend={EXACT!r} gives the same numbers with fewer fusions",
    EXACT: "inductor fuses only what gives eager code's numbers: results are rounded where the plan says",
}


def rounding_of(backend: str | Callable[..., Any]) -> str:
    """A note on what a compiler does with the plan's rounding; "" if nothing is to be said, or nothing known."""
    return _ROUNDINGS.get(backend, "") if isinstance(backend, str) else ""


def frame_id() -> int | None:
    """The number of the frame that Dynamo is capturing; None if it captures none."""
    compiling = torch._guards.CompileContext.current_compile_id()
    return None if compiling is None else compiling.frame_id


ASKED_FOR = ("RecompileError", "FailOnRecompileLimitHit")
"""Errors that only a user's own setting makes Dynamo raise."""


def is_capture_error(error: BaseException) -> bool:
    """Whether Dynamo raised `error` because it cannot capture a model. Some keep their own type, with Dynamo's mark on them."""
    names = ("TorchDynamoException", "FailOnRecompileLimitHit")
    own = tuple(getattr(torch._dynamo.exc, name) for name in names if hasattr(torch._dynamo.exc, name))
    return isinstance(error, own) or hasattr(error, "innermost_user_frame_summary")


def reading() -> Any:
    """Dynamo's translator at work now; None if it reads no code."""
    return getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)


def wants_one_graph() -> bool:
    """Whether Dynamo may not break the graph that it is capturing."""
    now = reading()
    return now is not None and bool(now.one_graph or now.error_on_graph_break)


def inputs_to_hook() -> set[str]:
    """Names of the inputs of the graph under capture that the model puts hooks on.

    Dynamo keeps such hooks out of the graph. It registers them when the graph has run, on what the inputs are by then.
    """
    now = reading()
    hooks = () if now is None else now.output.side_effects.tensor_hooks.values()
    return {tensor.as_proxy().node.name for tensor, *_ in hooks}


def changes_objects() -> bool:
    """Whether Dynamo will replay a change of something that was there before the code that it reads, or put a hook on a tensor."""
    effects = reading().output.side_effects
    there = (each for each in effects.id_to_variable.values() if isinstance(each.mutation_type, _WAS_THERE))
    return bool(effects.tensor_hooks) or any(effects.is_modified(each) for each in there)


# -- who else is at work -----------------------------------------------------------------
def refuse_ambient_autocast() -> None:
    """Raise CaptureError inside a torch.autocast region."""
    if is_any_autocast_enabled():
        raise CaptureError(ambient_autocast())


def user_modes() -> list[Any]:
    """The dispatch modes around us, outermost first."""
    return [mode for mode in dispatch_modes() if mode is not None]


def at_work() -> bool:
    """Whether Dynamo is capturing, or would capture the frames that are called now."""
    return tracing_context() is not None or get_eval_frame_callback() is not None


def kept_out() -> bool:
    """Whether Dynamo is on, but kept from the frames that are called now, as checkpoint keeps it from its body."""
    return not at_work() and not why_switched_off()


def never_read(function: Callable[..., Any]) -> None:
    """Have Dynamo run `function` uncompiled where code that runs as written calls it: it asks what Dynamo is doing."""
    skip_code(function.__code__)


never_read(at_work)
never_read(kept_out)


# -- what Dynamo did not do --------------------------------------------------------------
def disabled() -> bool:
    """True if torch.compile hands functions back uncompiled."""
    return torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE", "") == "1"


def why_switched_off() -> str:
    """The switch that keeps Dynamo from capturing, with the remedy; "" if none does."""
    if disabled():
        return "Dynamo is disabled (TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE or torch._dynamo.config.disable); enable it"
    stance = getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", "default")
    if stance != "default":
        return f"torch.compiler.set_stance({stance!r}) tells Dynamo to run the original code; call the model outside of it"
    return ""


_FRAMES = "frames"
_APART = Counter({_FRAMES: 0})
"""Counts from backwards of compiled graphs: frames given up, and each reason."""


def frames_given_up() -> int:
    """How many frames Dynamo has given up in this process: they ran as written."""
    frames = counters["frames"]
    return frames["total"] - frames["ok"] - _APART[_FRAMES]


def reasons() -> dict[str, int]:
    """Dynamo's reasons so far for code that it cannot capture, with counts."""
    said = counters["unimplemented"]
    return {text: count - _APART[text] for text, count in said.items()} if said else {}


def new_reasons(before: dict[str, int]) -> tuple[str, ...]:
    """First lines of what it has said since."""
    new = [text for text, count in reasons().items() if count > before.get(text, 0)]
    return tuple(dict.fromkeys(first_line(text) for text in new))


def without_counting_backwards(backend: Callable[..., Any]) -> Callable[..., Any]:
    """`backend`; what is counted while the first backward of a graph of its runs is not.

    A compiler makes the backward when it is first wanted. In a forward that takes gradients itself Dynamo looks on, and gives up
    code of the compiler that is none of the model's. It gives up each code once, so later backwards count nothing.
    """

    def compile_graph(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        run = backend(module, example_inputs)
        made: list[bool] = []

        def call(*inputs: Any) -> Any:
            results = run(*inputs)
            if not made:
                tensors = (each for each in results if isinstance(each, torch.Tensor)) if isinstance(results, tuple | list) else ()
                for node in {each.grad_fn for each in tensors} - {None}:
                    _leave_out_of_counts(node, made)
            return results

        return call

    return compile_graph


def _leave_out_of_counts(node: Any, made: list[bool]) -> None:
    """Take what is counted while a node of autograd runs out of the counts; `made` is filled when it has run."""
    began: list[tuple[int, dict[str, int]]] = []

    @uncaptured
    def before(gradients: Any) -> None:
        began.append((frames_given_up(), reasons()))

    @uncaptured
    def after(given: Any, taken: Any) -> None:
        frames, said = began.pop()
        _APART[_FRAMES] += frames_given_up() - frames
        _APART.update({text: count - said.get(text, 0) for text, count in reasons().items()})
        made.append(True)

    hook_node(node, before, after)


def first_line(text: object) -> str:
    return plain_reason(str(text).strip().partition("\n")[0].strip())
