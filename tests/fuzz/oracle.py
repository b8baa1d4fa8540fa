"""What is right: the fp32 run, torch.autocast's beside it, and one that rounds every op's result.

1. Structure, dtypes, identities and shared memory of results, and what inputs and buffers hold afterwards, are fp32's.
2. A program whose every op gives what the low format holds is *exact*: rounding changes nothing, so any difference is a wrong graph.
3. Numbers that are made of integers alone, such as positions, counts and angles of them, are rounded in no run under the default lists: a
   program of them has no bar from autocast, which rounds them where a product stands on their way.
4. Otherwise an error may be twice autocast's, or the format's floor; beyond that, what lies within three times the error of rounding
   every op, or twice the worst of several runs whose values are rounded up or down at random, is called rounding and told apart.
5. What is finite under autocast is finite; where autocast cannot run the program, what is finite rounded, or, if no rounded run can
   follow it, what the format holds. If the program fixes the loss scale, so must be the rounded run with that scale: a scaled gradient
   beyond fp16 is no fault of the graph. Hooks get NaN in place of infinities there: one that clamps would hide the overflow.
6. Calls whose results nobody keeps leave no autograd graph behind.
"""

from __future__ import annotations

import gc
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

import amprewrite
from tests.fuzz.programs import FORMATS

TWICE = "torch.compile with aot_autograd does not currently support double backward"
"""PyTorch's error for second derivatives behind a compiler."""
DONATED = "compiled with non-empty donated buffers"
"""PyTorch's error for `retain_graph=True` with a compiler, if a graph saved what backward alone needs: a cast is such a value."""
T = TypeVar("T")
LOW = FORMATS
FLOOR = {"bf16": 1e-2, "fp16": 2e-3}
PRODUCTS = frozenset(["linalg_matrix_power", "kron", "cdist"])
"""Ops that run products inside, of which a plan does not count the FLOPs."""
LIBRARY = Path(amprewrite.__file__).parent


@dataclass(frozen=True)
class Problem:
    """One way in which a case is wrong; `kind` and `where` are what its signature is made of."""

    kind: str
    where: str
    text: str
    at: int = -1
    """The operation of a sequence that showed it."""


@dataclass
class Record:
    """What one run of a model left: everything that is compared, by name."""

    values: dict[str, Any] = field(default_factory=dict)
    """Tensors (detached copies) and whatever else was returned, by a name such as "0 result 1" or "0 gradient a1.weight"."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What must agree to the letter: structure, dtypes, shapes, identities, memory."""
    cut: set[str] = field(default_factory=set)
    """Names of gradients of views that were written under `no_grad`. Only views take a new history there, from which earlier readers are
    missing, and kernels choose whether a gradient is a view: such a gradient is not compared where fp32's is one."""
    warnings: list[str] = field(default_factory=list)

    def keep(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.values[name] = value.detach().to("cpu", copy=True)
            self.facts[f"{name} device"] = value.device.type
            self.facts[f"{name} dtype"] = str(value.dtype)
            self.facts[f"{name} shape"] = tuple(value.shape)
        else:
            self.facts[name] = value if isinstance(value, int | float | bool | str | None | tuple) else type(value).__name__


class Draws(Generic[T]):
    """Runs with other roundings, by number: each is made when it is asked for, and kept. A run that fails is None, and left out."""

    def __init__(self, run: Callable[[int], T | None], most: int) -> None:
        self.run, self.most = run, most
        self.made: list[T | None] = []

    def __iter__(self) -> Iterator[T]:
        for number in range(self.most):
            if number == len(self.made):
                self.made.append(self.run(number))
            found = self.made[number]
            if found is not None:
                yield found


def start_clean() -> None:
    """Forget the captured code of earlier cases, and leave the regions and the torch.func transforms that an error kept open."""
    torch._dynamo.reset()
    torch.set_grad_enabled(True)
    while torch._C._functorch.peek_interpreter_stack() is not None:
        torch._C._functorch.pop_dynamic_layer_stack()
    for _ in range(_regions_of_autocast()):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(True)
    for device in ("cpu", "cuda"):
        torch.set_autocast_enabled(device, False)


def _regions_of_autocast() -> int:
    nested: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nested


def thread_modes() -> dict[str, Any]:
    """The modes of this thread by name. In an autocast region that an error left open, autocast keeps its copies of weights for ever."""
    return {
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (_regions_of_autocast(), torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "torch.func": torch._C._functorch.get_dynamic_layer_stack_depth(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }


def left_on(before: dict[str, Any]) -> Problem | None:
    """The first mode of this thread that is another than `before`: the case has left it on."""
    for name, value in thread_modes().items():
        if value != before[name]:
            return Problem("leaves on", name, f"{name}: {before[name]} before the case, {value} after it")
    return None


class Mark(torch.autograd.Function):
    """Gives its operand, and is a node that `growth` sees."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def growth(call: Callable[[], object]) -> int:
    """How many more nodes of Python functions, and with them tensors that they save, are alive after two further calls.

    `call` keeps no result. What an earlier call left behind, or the last one, may be replaced; none may stay for each call.
    """
    counts = []
    for _ in range(2):
        call(), call()
        gc.collect()
        counts.append(sum(isinstance(each, torch._C._FunctionBase) for each in gc.get_objects()))
    return max(0, counts[1] - counts[0])


def memory_of(tensors: dict[str, torch.Tensor]) -> tuple[tuple[str, str], ...]:
    """Pairs of names whose tensors share memory; a pair that is one object says so."""
    names = list(tensors)
    found = []
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            a, b = tensors[one], tensors[other]
            if a is b:
                found.append((one, f"is {other}"))
            elif a.numel() and b.numel() and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr():
                found.append((one, f"shares with {other}"))
    return tuple(found)


def learns(value: torch.Tensor) -> bool:
    """Whether it takes a gradient: a view that was made under no_grad says as its base does that it requires one, and passes none on."""
    base = value._base
    return value.requires_grad and (value.grad_fn is not None or base is None or not base.requires_grad)


def is_cut(value: torch.Tensor) -> bool:
    """Whether it is a view that took a new history: the write is not in the history, so it was made where none is recorded."""
    if not value._is_view() or value.grad_fn is None or value.grad_fn.name() != "AsStridedBackward0":
        return False
    return all(before is not None and before.name() != "CopySlices" for before, _ in value.grad_fn.next_functions)


def compare(
    want: Record,
    got: Record,
    autocast: Record | None,
    rounded: Record | None,
    exact: bool,
    low: str,
    bounds: Sequence[Record | None] = (),
    draws: Iterable[Record] = (),
) -> Problem | None:
    """The first way in which `got` is not right, rounding last; None where it is.

    What is not finite in one of the runs `bounds` need not be here. `draws` are other roundings, read on until one is enough. Where no
    other run tells what the format holds, a gradient beyond its range lets all of its call be what they like: they are made of it.
    Gradients are sums with terms like the largest of their call: what fp32 leaves where terms cancel is as large as its roundings of that.
    """
    for name, value in want.facts.items():
        if name not in got.facts:
            return Problem("missing", _kind(name), f"{name}: {value} in fp32, absent here")
        if not _same(got.facts[name], value):
            return Problem("differs", _kind(name), f"{name}: {value} in fp32, {got.facts[name]} here")
    for name in got.facts.keys() - want.facts.keys():
        return Problem("extra", _kind(name), f"{name}: {got.facts[name]} here, absent in fp32")
    found = None
    far = {name.partition(" ")[0] for name, value in want.values.items() if " gradient" in name and not _fits(value, low)}
    noise: dict[str, float] = defaultdict(lambda: 1e-6)
    for name, value in want.values.items():
        if " gradient" in name and value.is_floating_point():
            call = name.partition(" ")[0]
            noise[call] = max(noise[call], 1e-6 * float(value.double().nan_to_num(0.0, 0.0, 0.0).norm()))
    for name, value in want.values.items():
        if name in want.cut:
            continue
        least = noise[name.partition(" ")[0]] if " gradient" in name else 1e-6
        beside, other, *further = (None if r is None else r.values.get(name) for r in (autocast, rounded, *bounds))
        fits = _fits(value, low) and not (" gradient" in name and name.partition(" ")[0] in far)
        problem = _compare_value(name, value, got.values[name], beside, other, further, exact, low, fits, least)
        if problem is not None and problem.kind == "inexact":
            drawn = (r.values.get(name) for r in draws)  # a draw may take another branch, too
            problem = replace(problem, kind="rounding") if _explained(value, got.values[name], drawn) else problem
        if problem is not None and problem.kind != "rounding":
            return problem
        found = found or problem
    return found


def _fits(value: torch.Tensor, low: str) -> bool:
    return not value.is_floating_point() or _largest(value) <= torch.finfo(LOW[low]).max


def _largest(value: torch.Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _explained(want: torch.Tensor, got: torch.Tensor, draws: Iterable[torch.Tensor | None]) -> bool:
    """Whether one of the draws is half as far off as `got`, or further, or has no such value; what overflows in a draw tells nothing."""
    finite = want.isfinite() & got.isfinite()
    error = float((got - want)[finite].double().norm())
    for each in draws:
        if each is None or each.shape != want.shape:
            return True
        if 2 * float((each - want)[finite & each.isfinite()].double().norm()) >= error:
            return True
    return False


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and abs(a - b) <= 1e-2 * abs(b) + 1e-6) or (a != a and b != b)


def _kind(name: str) -> str:
    """ "0 gradient a1.weight dtype" is about "gradient dtype"."""
    words = name.split()
    return " ".join([words[1], *(word for word in words[2:] if word in ("device", "dtype", "shape", "requires_grad", "memory"))])


def _compare_value(
    name: str,
    want: torch.Tensor,
    got: torch.Tensor,
    autocast: torch.Tensor | None,
    rounded: torch.Tensor | None,
    bounds: Sequence[torch.Tensor | None],
    exact: bool,
    low: str,
    fits: bool,
    least: float,
) -> Problem | None:
    if not want.is_floating_point():
        if not exact or torch.equal(want, got):
            return None
        return Problem("wrong", _kind(name), f"{name}: {_shown(want)} in fp32, {_shown(got)} here")
    autocast, rounded, *further = (None if each is None or each.shape != want.shape else each for each in (autocast, rounded, *bounds))
    peers = [each for each in (rounded if autocast is None else autocast, *further) if each is not None]
    alike = rounded is not None and _largest(want) <= 2 * _largest(rounded)  # a rounded run may take another branch: no such gradient
    held = autocast is not None or fits or alike
    if held and all(bool(each.isfinite().all()) for each in (want, *peers)) and not bool(got.isfinite().all()):
        return Problem("not finite", _kind(name), f"{name}: {_shown(want)} in fp32, {_shown(got)} here")
    finite = want.isfinite() & got.isfinite()
    for each in peers:
        finite &= each.isfinite()
    want, got = want.double()[finite], got.double()[finite]
    size, error = float(want.norm()), float((want - got).norm())
    # a hook that clamps gives another gradient at another loss scale: then the rounded run, which shows that no op rounds, is another run
    if exact and (rounded is None or float((rounded.double()[finite] - want).norm()) <= 1e-6 * size + 1e-12):
        if error <= 1e-6 * size + 1e-12:  # what is left of terms that cancel hangs on the order in which a kernel adds them
            return None
        return Problem(
            "wrong", _kind(name), f"{name}, exact: {_shown(want)} in fp32, {_shown(got)} here, {error / max(size, 1e-30):.3g} off"
        )
    saturated = " gradient" in name and not size  # 1 - tanh(9) ** 2 is zero in fp32, and what other roundings leave is small
    bar = FLOOR[low] * size + max(least, 1e-4 * saturated)
    if autocast is not None:
        bar = max(bar, 2 * float((autocast.double()[finite] - want).norm()))
    if error <= bar:
        return None
    noise = 3 * FLOOR[low] * size  # of a program that no run with other roundings can follow
    if rounded is not None:
        difference = rounded.double()[finite] - want
        noise = 3 * float(difference[difference.isfinite()].norm()) + 3 * FLOOR[low] * size * (not bool(difference.isfinite().all()))
    kind = "rounding" if error <= noise else "inexact"
    said = (
        f"{name}: {error / max(size, 1e-30):.3g} off, the bar is {bar / max(size, 1e-30):.3g}; {_shown(want)} in fp32, {_shown(got)} here"
    )
    return Problem(kind, _kind(name), said)


def _shown(value: torch.Tensor) -> str:
    return str([round(each, 5) if isinstance(each, float) else each for each in value.flatten()[:5].tolist()])


def failure(error: BaseException) -> Problem:
    """The problem that an exception is: its type, and the innermost line of the library that it passed."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if LIBRARY in Path(frame.filename).parents or "/passes/" in frame.filename
    ]
    inner = getattr(error, "inner_exception", None)
    where = f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "outside the library"
    kind = type(error).__name__ if inner is None else f"{type(error).__name__} of {type(inner).__name__}"
    return Problem("raises", f"{kind} in {where}", f"{kind}: {' '.join(str(error).split())[:400]}")


def untold(amp: nn.Module, ran: Counter[torch.dtype], warned: list[str]) -> Problem | None:
    """Heavy ops that ran in fp32 though neither plan nor warning names one."""
    plan = amp.plan
    if not ran[torch.float32] or plan.skipped or warned:
        return None
    # attention's math kernel takes low values to fp32 for its two products, and a graph that may overflow unseen runs ahead of a call
    inside = 4 * sum(node.op == "scaled_dot_product_attention" for node in plan.nodes)
    if ran[torch.float32] <= inside:
        return None
    high = [node for node in plan.nodes if node.colour.value == "high"]
    if any(node.flops or node.op in PRODUCTS for node in high):
        return None
    return Problem(
        "untold", "heavy ops in fp32", f"{ran[torch.float32]} heavy ops ran in fp32; the plan says: {plan.counts().splitlines()[-1]}"
    )
