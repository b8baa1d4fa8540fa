"""One program, run in fp32, rounded, under autocast and rewritten, and compared."""

from __future__ import annotations

import contextlib
import hashlib
import re
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import amprewrite
from amprewrite.accuracy.verify import verify
from amprewrite.runtime.model.rewritten import is_rewritten
from tests.fuzz.helpers import Sink
from tests.fuzz.modes import Doubled, HeavyOps, Hooked, Rounded, Scattered, ToldHooks
from tests.fuzz.oracle import (
    DONATED,
    FLOOR,
    LOW,
    TWICE,
    Draws,
    Mark,
    Problem,
    Record,
    compare,
    failure,
    growth,
    is_cut,
    learns,
    left_on,
    memory_of,
    start_clean,
    thread_modes,
    untold,
)
from tests.fuzz.programs import Program, batch, initialised, load_unfit, passed

T = TypeVar("T")
AGAIN = "on any region computed under selective activation checkpoint"
"""PyTorch's error for a second backward: code as written may stop its recomputation before the first value that was kept."""
DRAWS = 64
"""Runs with other roundings, for results that are further off than one of them explains."""

WHOLLY_LOW = ("o2", "o3")
"""Lists that ask for low ops everywhere."""
LOWER = ("tf", *WHOLLY_LOW)
"""Lists that ask for low ops where autocast has none: what a wholly rounded model does not hold, they need not hold."""

OVERFLOW_TOLD = "gives NaN or infinities in fp16"
"""What the library says of a first call that it could not save."""

REENTRANT = "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad()"
"""A clear error in place of gradients that leave out a checkpoint's own weight: torch.compile takes it in, silently."""


def check(program: Program) -> Problem | None:
    """What is wrong with the rewritten program; None where nothing is, or where the program does not run in fp32."""
    if program.device != "cpu" and any(each.tag == "large_refused" for each in program.body):
        return None  # a kernel that refuses a value on a GPU ends the process
    asked = program.traced and hasattr(torch._dynamo.config, "trace_autograd_ops")
    with torch._dynamo.config.patch(trace_autograd_ops=True) if asked else contextlib.nullcontext(), _default_device(program):
        return _checked(program)


@contextlib.contextmanager
def _default_device(program: Program) -> Iterator[None]:
    """torch's default device is the program's, if it asks for that."""
    before = torch.get_default_device()
    if program.device != "cpu":
        torch.backends.cudnn.allow_tf32 = False  # fp32 is the truth
    if program.everything_there and program.device != "cpu":
        torch.set_default_device(program.device)
    try:
        yield
    finally:
        if program.device != "cpu":
            torch.set_default_device(None if before.type == "cpu" else before)


def _checked(program: Program) -> Problem | None:
    start_clean()
    with _quiet():
        try:
            want = run(program, initialised(program, plain=True))
        except Exception:
            return None
        low = LOW[program.dtype]
        lists = dict(program.options).get("lists")
        numbers = lists in WHOLLY_LOW
        mode = Rounded(low, numbers=numbers, counts=lists is not None)
        whole = 1 / program.factor  # without a scale a tiny loss would be lost
        rounded = _plainly(program, ToldHooks, lambda: mode, whole)
        exact = rounded is not None and mode.exact and not program.huge
        counts = lists is None and any(each.tag.startswith("count") for each in program.body)
        autocast = None if exact or counts else _plainly(program, partial(_autocast, program), scale=whole)
        bounds = [_spread(rounded) if lists in LOWER or (autocast is None and not exact) else None, _scaled(program, want)]

    def draw(seed: int) -> Record | None:
        def rounding() -> TorchDispatchMode:
            return Doubled() if seed == 0 else Scattered(low, seed, numbers, products=seed % 4 == 3, counts=lists is not None)

        with _quiet():
            return _plainly(program, around=rounding, scale=whole)

    draws = Draws(draw, DRAWS)

    def judged(got: Record) -> Problem | None:
        found = compare(want, got, autocast, rounded, exact, program.dtype, bounds, draws)
        return found if found is not None and found.kind != "rounding" else _overflow_untold(want, got, autocast, program) or found

    got, modes = None, thread_modes()
    try:
        amp, got = rewritten(program)
        problem = left_on(modes) or judged(got)
    except Exception as error:
        problem = left_on(modes) or failure(error)
    if problem is not None:
        return problem if problem.kind == "rounding" else _ours(program, problem, got, judged)
    refused = [each for each in got.warnings if "PassError" in each or "report" in each]
    if refused:
        with _quiet():
            start_clean()
            alone = _tried(lambda: run(program, _compiled(program))) is None  # it refuses the program without any rewrite
        where = re.sub(r"\\d+|%\\w+", "N", refused[0].partition("PassError")[2])[:60]
        return Problem("PyTorch alone: refused" if alone else "refused", where, refused[0])
    return _further(program, amp, got, exact) or _kept(program, amp)


@contextlib.contextmanager
def _autocast(program: Program) -> Iterator[None]:
    with torch.autocast(program.device, LOW[program.dtype]), ToldHooks():
        yield


def _overflow_untold(want: Record, got: Record, autocast: Record | None, program: Program) -> Problem | None:
    """Results of a first call in fp16 are finite where fp32's are; what autocast gives excuses only gradients taken inside.

    It is enough that the overflow is told of lists that put all low, as what they round to a pole is in range before.
    """
    told = any(OVERFLOW_TOLD in warning for warning in got.warnings)
    may_stay = dict(program.options).get("lists") in WHOLLY_LOW
    if program.dtype != "fp16" or (told and may_stay):
        return None
    for name, value in want.values.items():
        beside = autocast.values.get(name) if autocast is not None and "autograd.grad(" in program.source() else None
        if beside is not None and beside.shape == value.shape and not bool(beside.isfinite().all()):
            continue
        if value.is_floating_point() and bool(value.isinf().any()):  # fp32 is at a pole itself, and roundings move which elements are
            continue
        if " result " in name and value.is_floating_point() and bool((value.isfinite() & ~got.values[name].isfinite()).any()):
            said = f"{name}: {value.flatten()[:5].tolist()} in fp32, not finite here, {'' if told else 'un'}told"
            return Problem("not finite", "result of a first call", said)
    return None


def _spread(rounded: Record | None) -> Record | None:
    """The rounded run as a bound: where one gradient of a call is not finite, any may be, as it hangs on what a ReLU lets through."""
    if rounded is None:
        return None
    found = Record(dict(rounded.values))
    gradients = [name for name in rounded.values if " gradient" in name]
    for call in {name.partition(" ")[0] for name in gradients if not rounded.values[name].isfinite().all()}:
        found.values |= {name: rounded.values[name] * torch.inf for name in gradients if name.partition(" ")[0] == call}
    return found


def _scaled(program: Program, want: Record) -> Record | None:
    """The rounded run with the loss scale that the program fixes; None where it fixes none.

    A Function of the program may bound a scaled gradient there, which the rewrite gives it unscaled: a gradient that does not fit once
    it is scaled has no bound.
    """
    scale = dict(program.options).get("loss_scale")
    if not isinstance(scale, int | float):
        return None
    found = _plainly(program, ToldHooks, lambda: Rounded(LOW[program.dtype]), scale) or Record()
    for name, value in want.values.items():
        most = float(value.abs().max()) if value.numel() and " gradient" in name else 0.0
        if most * scale * program.factor > torch.finfo(LOW[program.dtype]).max:
            found.values[name] = torch.full_like(value, torch.inf)
    return found


def _ours(program: Program, problem: Problem, got: Record | None, judged: Callable[[Record], Problem | None]) -> Problem | None:
    """The problem, unless PyTorch has it alone: eager fp32 fails, or torch.compile without any rewrite is as wrong, or raises that error.

    Numbers of a gradient are ours all the same: nobody is told of them.
    """
    start_clean()
    raised: list[BaseException] = []
    hooked = Hooked()
    with _quiet():
        eager = _tried(lambda: run(program, initialised(program), within=lambda: hooked))
        falls_back = "backend" not in dict(program.options)  # as the rewrite does: code that Dynamo fails on runs as written
        with torch._dynamo.config.patch(suppress_errors=falls_back):
            compiled = _tried(lambda: run(program, _compiled(program)), raised)
            if compiled is not None and problem.kind == "raises" and not falls_back:  # perhaps casts are what the compiler fails on
                compiled = _tried(lambda: run(program, _compiled(program), partial(_autocast, program)), raised)
    if eager is None or judged(eager) is not None or any(each in problem.text for each in (REENTRANT, DONATED, TWICE)):
        return None
    if AGAIN in problem.text and not falls_back:  # a compiled recomputation does not stop early
        return None
    if "gradient" in problem.where and any(map(is_cut, hooked.tensors)):  # it drops these hooks, against its notes on in-place writes
        return replace(problem, kind=f"PyTorch alone: {problem.kind}")
    lost = problem.kind == "missing" and problem.where.startswith("gradient")
    source = program.source()
    if lost and ("region" in program.tags() or ("Sink.apply" in source and "graph_break" not in source)):  # a row of limits.md
        return replace(problem, kind=f"PyTorch alone: {problem.kind}")
    alike = any(_said(problem)[:200] in _said(failure(each)) for each in raised)
    alike = alike or (lost and not falls_back)  # AOTAutograd's zeros in place of None
    if compiled is None and (alike or "region." in problem.where or "outside" in problem.where):
        return replace(problem, kind=f"PyTorch alone: {problem.kind}")  # no capture failed, so there is nothing to fall back to
    if problem.where == "gradient" and ".data." in program.source():  # autograd is not told: what a copy kept, fp32 reads as it is now
        asked = dict(program.options)
        if asked.get("lists") in WHOLLY_LOW or "granularity" in asked:  # they have copies where autocast has none
            return replace(problem, kind=f"PyTorch alone: {problem.kind}")
        with _quiet():
            low = _tried(lambda: run(program, initialised(program), partial(_autocast, program)))
        beside = None if low is None or got is None else judged(replace(low, facts=got.facts))
        alike = beside is not None and (beside.kind, beside.where) == (problem.kind, problem.where)
        if low is None or alike:  # autocast does not run on a CPU that has no complex fp16, for instance
            return replace(problem, kind=f"PyTorch alone: {problem.kind}")
    if (problem.kind, problem.where) == ("not finite", "gradient"):  # beyond the format, whoever asks for it
        asked = dict(program.options).get("loss_scale")
        scale = asked if asked and isinstance(asked, int | float) else 1 / program.factor
        with _quiet():
            low = _plainly(program, partial(_autocast, program), scale=scale)
        beside = None if low is None else low.values.get(problem.text.partition(": ")[0])
        if beside is not None and not bool(beside.isfinite().all()):
            return replace(problem, kind=f"PyTorch alone: {problem.kind}")
    retained = not falls_back and " gradient input" in problem.text  # AOTAutograd gives a written input the gradient of what it became
    hooked_alias = not falls_back and any("hook" in each.tag for each in program.body)  # a row of limits.md
    number = (problem.kind, problem.where) == ("inexact", "gradient") and not (retained or hooked_alias)
    if problem.kind != "raises" and compiled is not None and not number:
        alone = judged(compiled)
        if alone is not None and (alone.kind, alone.where) == (problem.kind, problem.where):
            return replace(problem, kind=f"PyTorch alone: {problem.kind}")
    return problem


def _said(problem: Problem) -> str:
    """What an error says, but for the dtype, the version and the origin of the tensor that it names, which casts change."""
    return re.sub(r"torch\.\w*Tensor|, which is output \d+ of \w+,|at version \d+|expected version \d+", "", problem.text)


def _compiled(program: Program) -> nn.Module:
    """The fp32 model under torch.compile; "eager" runs marked regions without a backward."""
    model, compiler = initialised(program), dict(program.options).get("backend", "eager")
    model.compile(backend="aot_eager" if "region" in program.tags() else compiler)
    return model


def rewritten(program: Program) -> tuple[nn.Module, Record]:
    """The rewritten model and the record of its run; AmpRewriteWarnings are in the record."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        amp = amprewrite.rewrite(initialised(program), **dict(program.options))
        got = run(program, amp)
    got.warnings = [str(each.message) for each in heard if issubclass(each.category, amprewrite.AmpRewriteWarning)]
    return amp, got


def _further(program: Program, amp: nn.Module, got: Record, exact: bool) -> Problem | None:
    """Heavy ops, export and verify, where the program asks for them."""
    without_gradients = _runs(program, "no_grad")
    if "heavy" in program.checks and without_gradients:
        ops = HeavyOps()
        with _quiet(), torch.no_grad():
            try:
                with ops:
                    amp(*batch(program))
            except Exception as error:
                problem = failure(error)
                refused = "backend" in dict(program.options) and _tried(lambda: _compiled(program)(*batch(program))) is None
                return replace(problem, kind=f"PyTorch alone: {problem.kind}") if refused else problem
        problem = untold(amp, ops.ran, got.warnings)
        if problem is not None:
            return problem
    calls_are_pure = not any(each.tag in ("buffer", "counter", "array", "set_attribute", "large_parameter") for each in program.body)
    if "export" in program.checks and calls_are_pure and any("result 0" in name for name in got.values):
        return _exported(program, amp, exact)
    if "verify" in program.checks and calls_are_pure and without_gradients:
        with _quiet(), torch.set_grad_enabled(_runs(program, "grad")):  # torch.cond refuses some bodies only with gradients
            try:
                verify(amp, tuple(each + 0 for each in batch(program)))
            except amprewrite.CaptureError:
                return None
            except Exception as error:
                problem = failure(error)
                return Problem("verify raises", problem.where, problem.text)
    return None


def _kept(program: Program, amp: nn.Module) -> Problem | None:
    """A call whose results nobody keeps leaves no graph behind; a model that keeps values itself does that in fp32, too."""

    def more(model: nn.Module) -> int | None:
        def call() -> None:
            given = [Mark.apply(each) if each.requires_grad else each for each in batch(program)]
            model(*passed(program, given, half=is_rewritten(model)))

        with _quiet():
            return _tried(lambda: growth(call))

    found = program.seed % 8 == 1 and more(amp)  # looking through all objects takes a while
    if not found or more(initialised(program, plain=True)) or more(_compiled(program)):  # Dynamo keeps tensors of each new capture
        return None
    return Problem("kept", "graphs of calls", f"two calls leave {found} nodes of their graphs")


def _runs(program: Program, how: str) -> bool:
    """Whether the fp32 model runs with gradients, or without."""
    return _tried(lambda: run(replace(program, calls=(how,)), initialised(program))) is not None


def _exported(program: Program, amp: nn.Module, exact: bool) -> Problem | None:
    """An exported program gives what the rewritten model gives where that is finite, or says that it does not.

    It rounds code that the rewritten model leaves out and runs in fp32, so its numbers are no others' then.
    """
    left_out = bool(amp.plan.skipped)
    fresh = program.dtype == "fp16" and program.seed % 2 == 1  # one that was never called has seen its weights, and no values
    if fresh:
        with _quiet():
            amp = amprewrite.rewrite(initialised(program), **dict(program.options))
    with warnings.catch_warnings(record=True) as heard, torch.no_grad():
        warnings.simplefilter("always")
        try:
            exported = amp.export_program(tuple(each.detach() for each in batch(program))).module()
        except amprewrite.AmpRewriteError:
            return None
        except Exception as error:
            problem = failure(error)
            return Problem("export raises", problem.where, problem.text)
        told = any(issubclass(each.category, amprewrite.AmpRewriteWarning) and "infinities" in str(each.message) for each in heard)
        amp.eval() if not amp.training else amp
        held = [each.clone() for each in amp.buffers()]
        results = tree_flatten(exported(*(each.detach() for each in batch(program))))[0]
        for buffer, before in zip(amp.buffers(), held, strict=True):  # statistics of a batch norm that both update
            buffer.copy_(before)
        own = tree_flatten(amp(*(each.detach() for each in batch(program))))[0]
    for index, (one, other) in enumerate(zip(own, results, strict=False)):
        if isinstance(one, torch.Tensor) and one.is_floating_point() and one.isfinite().all():
            if not other.isfinite().all():
                if told:
                    return None
                return Problem("export", "not finite", f"result {index}: finite rewritten, not finite exported")
            allowed = 1e-6 * float(one.norm()) if exact else 4 * FLOOR[program.dtype] * float(one.norm()) + 1e-3
            error = float((one - other).norm())
            if not left_out and not fresh and error > allowed and not _jumps(program, index, error):
                return Problem(
                    "export", "differs", f"result {index}: {one.flatten()[:4].tolist()} rewritten, {other.flatten()[:4].tolist()} exported"
                )
    return None


def _jumps(program: Program, index: int, error: float) -> bool:
    """Whether another rounding takes a result half as far as `error`: a mask or a count of rounded numbers jumps."""

    def result(around: Any) -> torch.Tensor:
        with around:
            found: torch.Tensor = tree_flatten(initialised(program, plain=True)(*batch(program)))[0][index]
        return found

    with _quiet(), torch.no_grad():
        want = result(contextlib.nullcontext())
        return any(2 * float((result(Scattered(LOW[program.dtype], seed)) - want).norm()) >= error for seed in range(8))


def run(
    program: Program,
    model: nn.Module,
    within: Callable[[], Any] = contextlib.nullcontext,
    around: Callable[[], Any] = contextlib.nullcontext,
    scale: float = 1.0,
) -> Record:
    """Call the model as the program says, take gradients, and keep all that can be seen; `within` is around forwards alone.

    Losses are multiplied by `scale` and the factor of the program, and gradients divided by it.
    """
    record, scale = Record(), scale * program.factor
    for index, how in enumerate(program.calls):
        inputs = batch(program, wide=how == "wide")
        inputs = [each + 0 if each.requires_grad and how != "no_grad" else each for each in inputs]
        leaves = [each for each in inputs if each.requires_grad and not each.is_leaf]
        hooked: list[torch.Tensor] = []
        for each in leaves:
            each.retain_grad()
            if program.seed % 2 == 0:
                each.register_hook(hooked.append)
        model.train(how != "eval")
        if how == "load":
            load_unfit(model, large=program.seed % 3 > 0)
        model.zero_grad()
        torch.manual_seed(program.seed + 7)
        grad = how not in ("no_grad", "inference")
        with contextlib.ExitStack() as stack:
            stack.enter_context(around())
            stack.enter_context(torch.enable_grad() if grad else torch.inference_mode() if how == "inference" else torch.no_grad())
            with within():
                result = model(*passed(program, inputs, half=is_rewritten(model)))
            record.facts[f"{index} type"] = type(result).__name__
            result = vars(result) if isinstance(result, UserDict | SimpleNamespace) else result
            inputs = inputs[: 1 if program.holder else None]
            _keep_results(record, index, result, model, inputs)
            record.facts[f"{index} draws"] = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8]
            if grad:
                _backward(program, record, index, result, inputs, scale)
            if "write" in program.checks:
                _write(record, index, result)
        for name, buffer in model.named_buffers():
            record.keep(f"{index} buffer {name}", buffer)
        for name, parameter in model.named_parameters():
            record.keep(f"{index} gradient {name}", _unscaled(parameter.grad, scale))
        for place, each in enumerate(inputs):
            record.keep(f"{index} input {place}", each)
            record.keep(f"{index} gradient input{place}", _unscaled(each.grad, scale) if each.requires_grad else None)
        record.facts[f"{index} attributes"] = model.count, model.array.tolist()
        record.facts[f"{index} hooks called"] = len(hooked)
    return record


def _keep_results(record: Record, index: int, result: Any, model: nn.Module, inputs: list[torch.Tensor]) -> None:
    leaves, spec = tree_flatten(result)
    record.facts[f"{index} structure"] = str(spec)
    tensors = {f"result {place}": each for place, each in enumerate(leaves) if isinstance(each, torch.Tensor)}
    for place, each in enumerate(leaves):
        record.keep(f"{index} result {place}", each)
        if isinstance(each, torch.Tensor):
            record.facts[f"{index} result {place} requires_grad"] = learns(each)
    tensors |= {f"input {place}": each for place, each in enumerate(inputs)}
    tensors |= {f"parameter {name}": each for name, each in model.named_parameters()}
    tensors |= {f"buffer {name}": each for name, each in model.named_buffers()}
    record.facts[f"{index} result memory"] = memory_of(tensors)


def _unscaled(gradient: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    return gradient if gradient is None or scale == 1 else gradient / scale


def _backward(program: Program, record: Record, index: int, result: Any, inputs: list[torch.Tensor], scale: float) -> None:
    """Take the loss of the program, times `scale`; gradients of results are kept, too."""
    found = [each for each in tree_flatten(result)[0] if isinstance(each, torch.Tensor) and each.is_floating_point() and learns(each)]
    compiled = "backend" in dict(program.options)  # there results that share memory are views that the caller's side makes
    for each in found:
        if not each.is_leaf and not compiled:
            each.retain_grad()
    if not found:
        return
    weights = [scale * float(1 - 2 * (place % 2)) * (1 + place) for place in range(len(found))]
    terms = [weight * each.float().sum() for weight, each in zip(weights, found, strict=True)]
    if program.loss in ("each", "each_reversed"):
        for place, term in enumerate(terms if program.loss == "each" else reversed(terms)):
            term.backward(retain_graph=place + 1 < len(terms))
    elif program.loss == "unread":
        Sink.apply(*found)[0].float().sum().mul(scale).backward()
    elif program.loss == "first":
        terms[0].backward()
    elif program.loss == "square":
        sum(scale * each.float().square().sum() for each in found).backward()  # type: ignore[union-attr]
    elif program.loss == "mean":
        sum(scale * each.float().mean() for each in found).backward()  # type: ignore[union-attr]
    elif program.loss == "outputs" and len(found) > 1 and not compiled:  # a compiler has no gradient of one result by another
        grads = torch.autograd.grad(terms[0], found[1:], allow_unused=True, retain_graph=True)
        for place, each in enumerate(grads):
            record.keep(f"{index} gradient_of_result {place}", _unscaled(each, scale))
        for each in found:  # `grad` adds to what is retained if both are results of one autograd Function, and not else
            each.grad = None
        terms[0].backward()
    elif program.loss == "inner" and inputs[0].requires_grad:
        (grad,) = torch.autograd.grad(sum(terms), inputs[0], create_graph=True, allow_unused=True)
        grad = _unscaled(grad, scale)
        record.keep(f"{index} inner_gradient 0", grad)
        if grad is not None and grad.requires_grad:
            (scale * grad.square().sum() + sum(terms)).backward()
    else:
        sum(terms).backward()  # type: ignore[union-attr]
    for place, each in enumerate([] if compiled else found):
        record.keep(f"{index} gradient_of_result kept{place}", _unscaled(each.grad, scale))
        if is_cut(each):
            record.cut.add(f"{index} gradient_of_result kept{place}")


def _write(record: Record, index: int, result: Any) -> None:
    """Write the first number of the first result in place, as a caller may, and keep what all of them hold then."""
    leaves = [each for each in tree_flatten(result)[0] if isinstance(each, torch.Tensor)]
    floats = [each for each in leaves if each.is_floating_point() and not each.is_inference()]
    if not floats or len(leaves) < 2 or not floats[0].numel():
        return
    with torch.no_grad():
        floats[0][(0,) * floats[0].dim()].fill_(5.0)
    for place, each in enumerate(leaves):
        record.keep(f"{index} written {place}", each)


def _tried(call: Callable[[], T], raised: list[BaseException] | None = None) -> T | None:
    """What the call gives; None if it raises. `raised` takes its error, and those that led to it."""
    try:
        return call()
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and raised is not None:
            raised.append(cause)
            cause = cause.__cause__ or cause.__context__
        return None


def _plainly(program: Program, *how: Any, **named: Any) -> Record | None:
    """A run of the model as it is, with control flow in Python; `how` as of `run`."""
    return _tried(lambda: run(program, initialised(program, plain=True), *how, **named))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def shown(program: Program) -> str:
    """The program as a script that prints results and gradients in fp32 and rewritten."""
    inputs = ", ".join(
        f"torch.{'randint(-2, 3, ' + str(each.shape) + ').float()' if program.exact else 'randn(' + str(each.shape) + ')'}"
        for each in program.inputs
    )
    options = ", ".join(f"{name}={value!r}" for name, value in program.options)
    integers = "        [p.data.copy_(torch.randint(-1, 2, p.shape)) for p in model.parameters()]\n" if program.exact else ""
    moved = f"        model, inputs = model.to({program.device!r}), [each.to({program.device!r}) for each in inputs]\n"
    moved = "" if program.device == "cpu" else moved
    begins = f"torch.set_default_device({program.device!r})" if program.everything_there and moved else ""
    grads = [each.grad for each in program.inputs]
    held = f"        inputs = programs.passed({program!r}, inputs, half=low)\n" if program.holder else ""
    grouped = "group_weights.WITHOUT_LAUNCHES, group_weights.LEAST = set(), 2" if program.seed % 2 else ""
    return f"""{program.source()}

# loss {program.loss}, calls {program.calls}, also looked at {program.checks}, inputs with gradients {grads}, huge weight {program.huge}
if __name__ == "__main__":
    import amprewrite
    from amprewrite.passes.lower import group_weights
{"    from tests.fuzz import programs; from tests.fuzz.programs import *" if held else ""}
    {grouped}
    {begins}
{"    torch._dynamo.config.trace_autograd_ops = True" if program.traced else ""}
    for low in (False, True):
        torch.manual_seed({program.seed})
        model = M()
{integers}        inputs = [{inputs}]
{moved}        inputs = [each.requires_grad_() + 0 if grad else each for each, grad in zip(inputs, {grads})]
{held}        result = (amprewrite.rewrite(model, {options}) if low else model)(*inputs)
        print(result)
        found = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        [t.retain_grad() for t in found]
        sum((1 - 2 * (i % 2)) * (1 + i) * t.sum() for i, t in enumerate(found)).backward() if found else None
        print([t.grad for t in found], {{name: p.grad for name, p in model.named_parameters()}})
"""
