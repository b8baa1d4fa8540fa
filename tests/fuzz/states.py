"""Sequences of operations on one rewritten model: calls in every mode, optimizers, writes to weights, copies, surgery, hooks.

A plain fp32 model of the same structure goes through the same surgery. Before each compared call it is given the rewritten model's
parameters, buffers and gradients as they are then, so a result computed from old weights cannot agree with it.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import amprewrite
from amprewrite.runtime.training.loss_scale import LossScaleError
from tests.fuzz.modes import Moved
from tests.fuzz.nets import NETS, WIDTH, Guided
from tests.fuzz.oracle import DONATED, FLOOR, LOW, TWICE, Draws, Mark, Problem, failure, growth, left_on, start_clean, thread_modes

OPTIMIZERS = (
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop", "Adadelta", "Adafactor",
)  # fmt: skip
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
WRITES = (
    "data", "data_assign", "data_copy", "no_grad", "copy_", "set_", "swap", "load", "load_assign", "vector", "foreach", "dlpack", "numpy",
    "detach", "inference", "index", "out", "parameter",
)  # fmt: skip
COSTLY = (
    "part", "backward", "input_gradient", "through", "closure", "mode", "freeze", "replace_layer", "hook", "parameter_hook",
    "duplicate", "merge", "part_copy",
)  # fmt: skip
"""Operations that have the model captured anew; a sequence has two of these kinds, so that it takes a second and not ten."""
BARS = 4
"""Two roundings are independent draws: of many comparisons some are off by twice what autocast is. What is off by more is looked at."""
DRAWS = 24
"""Runs under autocast with other roundings, to tell what is off by more: the bar is twice the worst of them."""
LEARNED = "gradient of a parameter"
Found = dict[str, Tensor | None]
"""What a run gives, by "kind" or "kind: which"."""
Context = Callable[[], contextlib.AbstractContextManager[Any]]
Run = Callable[[nn.Module, Context], Found]
"""It is given a model and what stands around the forward."""
UNCOUNTED = ("data", "data_assign", "data_copy", "dlpack", "numpy")
"""Writes that PyTorch does not count: cache_weights="step" must be told of them."""


class Ahead(torch.optim.Optimizer):
    """Moves its weights, asks for gradients there, and steps from where it was, as extragradient does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in params]
        for p in params:
            p.mul_(1.25)
        with torch.enable_grad():
            loss = closure()
        for p, start in zip(params, before, strict=True):
            p.copy_(start if p.grad is None else start - self.param_groups[0]["lr"] * p.grad)
        return loss


class WrongError(Exception):
    """The rewritten model did something else than the plain one."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


@dataclass(frozen=True)
class Sequence:
    """One case: a net, options of rewrite, and operations, each a method of Trial with its arguments."""

    seed: int
    net: str
    tiny: bool
    options: tuple[tuple[str, Any], ...]
    operations: tuple[tuple[str, tuple[Any, ...]], ...]

    def tags(self) -> tuple[str, ...]:
        words = {" ".join([name, *(str(each) for each in arguments if isinstance(each, str))]) for name, arguments in self.operations}
        return (self.net, *sorted(words))


def _all_of(tensors: list[Tensor]) -> Tensor:
    """A copy of all their numbers, in a row."""
    return torch.cat([each.detach().flatten() for each in tensors])


def _copied(value: Any, how: str) -> Any:
    """A copy; PyTorch pickles no module with a weight norm."""
    modules = value.modules() if isinstance(value, nn.Module) else ()
    plainly = how == "deepcopy" or any(map(nn.utils.parametrize.is_parametrized, modules))
    return copy.deepcopy(value) if plainly else pickle.loads(pickle.dumps(value))


def _halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def _clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-100, 100)


def _halve_result(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result * 0.5


def _shift_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] + 1,)


def _halve_gradient(module: nn.Module, given: tuple[Tensor, ...], taken: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (given[0] * 0.5,)


class Trial:
    """A rewritten model and its plain companion. Each method does one thing to both and compares."""

    def __init__(self, net: str, seed: int, tiny: bool, options: dict[str, Any]) -> None:
        torch.manual_seed(seed)
        model = NETS[net]()
        if tiny:  # below what fp16 holds, as some published models are initialised
            model.second.weight.data.mul_(1e-9)
        self.plain = copy.deepcopy(model)
        self.options, self.low = options, str(options["dtype"])
        self.amp = amprewrite.rewrite(model, **options)
        self.optimizer: torch.optim.Optimizer | None = None
        scale = options.get("loss_scale", "auto")
        self.scaled = scale is not None and not (scale == "auto" and options["dtype"] == "bf16")
        self.fixed = isinstance(scale, int | float)
        """A scale that stays is there before any optimizer is known."""
        self.known = False
        """Whether the library may know an optimizer: then it scales gradients, and an overflow is no fault."""
        self.overflowed = False
        """Whether gradients that are there come from a backward that overflowed, whatever was done to them since."""
        self.told = False
        """Whether a step has heard of it."""
        self.either = False
        """Whether a step may be taken and may be skipped: zeros that no step has seen may be clamped infinities."""
        self.hooks: list[Any] = []
        """Of the plain model's parameters."""
        self.draws = torch.Generator().manual_seed(seed)
        self.given: tuple[float, ...] = ()
        """What the model takes besides its input."""
        self.losses: Callable[[Tensor], Tensor] = lambda out: out.square().mean()

    # -- comparing ------------------------------------------------------------------------------------------------
    def _sync(self) -> None:
        """Give the plain model all that the rewritten one holds."""
        theirs, buffers = dict(self.amp.named_parameters()), dict(self.amp.named_buffers())
        for name, mine in self.plain.named_parameters():
            mine.data = theirs[name].detach().clone()
            mine.grad = None if theirs[name].grad is None else theirs[name].grad.detach().clone()  # type: ignore[union-attr]
            mine.requires_grad_(theirs[name].requires_grad)
        for name, buffer in self.plain.named_buffers():
            buffer.data = buffers[name].detach().clone()
        modes = {name: module.training for name, module in self.amp.named_modules()}
        for name, module in self.plain.named_modules():
            module.training = modes[name]

    def _judge(self, run: Run, guarded: bool = False) -> None:
        """Compare what `run` gives of the rewritten model with what it gives of the plain one, alone and under autocast.

        `guarded`: a gradient may overflow, since an optimizer that skips is known.
        """
        grads = [(p, None if p.grad is None else p.grad.clone()) for p in self.plain.parameters()]
        buffers = [(b, b.clone()) for b in self.plain.buffers()]

        def of_plain(forward: Context = contextlib.nullcontext, around: Context = contextlib.nullcontext) -> Found:
            for p, grad in grads:
                p.grad = None if grad is None else grad.clone()
            for b, value in buffers:
                b.data = value.clone()
            with around():
                return run(self.plain, forward)

        def under_autocast(around: Context = contextlib.nullcontext) -> Found:
            low = partial(torch.autocast, "cpu", LOW[self.low])
            try:
                return of_plain(low, around)
            except RuntimeError:  # oneDNN has no low LSTM that learns on such a CPU; PyTorch's own kernels have one
                with torch.backends.mkldnn.flags(enabled=False):
                    return of_plain(low, around)

        want, beside = of_plain(), under_autocast()
        got = run(self.amp, contextlib.nullcontext)
        draws = Draws(lambda seed: under_autocast(partial(Moved, LOW[self.low], seed)), DRAWS)
        whole = sum(float(v.norm()) ** 2 for name, v in want.items() if name.startswith(LEARNED) and v is not None) ** 0.5
        for name, value in want.items():
            what = name.partition(":")[0]
            gradient = what.startswith("gradient")
            moved = partial(lambda name: (each[name] for each in draws), name)
            self._compare(what, value, got[name], beside.get(name), guarded and gradient, whole * (what == LEARNED), moved)

    def _compare(
        self,
        what: str,
        want: Tensor | None,
        got: Tensor | None,
        beside: Tensor | None = None,
        may_overflow: bool = False,
        whole: float = 0.0,
        moved: Callable[[], Iterable[Tensor | None]] = tuple,
    ) -> None:
        """WrongError if `got` is further from `want` than BARS times what autocast loses, or the floor, and than roundings explain.

        `whole` is the size of all gradients: one that vanishes in exact arithmetic is all rounding, and small beside it.
        `moved` gives what autocast would give if its values were rounded otherwise: twice the worst of those is rounding, too.
        """
        if want is None or got is None:
            if want is not got:
                raise WrongError(Problem("missing", what, f"{what}: {want} in fp32, {got} here"))
            return
        if want.shape != got.shape or want.dtype != got.dtype:
            raise WrongError(Problem("differs", what, f"{what}: {want.dtype} {want.shape} in fp32, {got.dtype} {got.shape} here"))
        if not got.isfinite().all():
            if may_overflow:
                self.overflowed, self.told = True, False
            elif want.isfinite().all() and (beside is None or beside.isfinite().all()):
                raise WrongError(Problem("not finite", what, f"{what} is not finite; it is in fp32 and under autocast"))
            return
        size, error = float(want.norm()), float((want - got).norm())
        allowed = BARS * FLOOR[self.low] * size + 0.05 * FLOOR[self.low] * whole + 1e-5
        if beside is not None and beside.isfinite().all():
            allowed = max(allowed, BARS * float((beside - want).norm()))
        if error > allowed:
            lost = [float((each - want).norm()) for each in moved() if each is not None and each.isfinite().all()]
            allowed = max([allowed, *(2 * each for each in lost)])
        if error > allowed:
            raise WrongError(
                Problem("wrong", what, f"{what} is {error / max(size, 1e-30):.3g} off, the bar is {allowed / max(size, 1e-30):.3g}")
            )

    def _batch(self, rows: int, hot: float = 1.0) -> Tensor:
        return hot * torch.randn(rows, WIDTH, generator=self.draws)

    def _uncounted(self) -> None:
        if self.options.get("cache_weights") == "step":
            self.amp.weights_changed()

    # -- calls ----------------------------------------------------------------------------------------------------
    def call(self, mode: str, rows: int) -> None:
        """A forward in one of four modes."""
        around = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode, "eval": torch.no_grad}[mode]
        if mode == "eval":
            self.mode("eval")
        self._sync()
        x = self._batch(rows)

        def run(model: nn.Module, forward: Context) -> Found:
            with around(), forward():
                return {f"result of a {mode} call": model(x, *self.given).detach().float()}

        self._judge(run)

    def part(self, name: str) -> None:
        """A part called by itself."""
        self._sync()
        x = self._batch(4)
        with torch.no_grad():
            self._compare("result of a part", self.plain.get_submodule(name)(x), self.amp.get_submodule(name)(x))

    def part_copy(self, name: str, how: str) -> None:
        """A copy of a part: it gives what the part gives, and has weights of its own."""
        name = name if hasattr(self.plain, name) else "first"
        self._sync()
        part, x = self.amp.get_submodule(name), self._batch(4)
        twin, plain = _copied(part, how), copy.deepcopy(self.plain.get_submodule(name))
        for which in ("a copied part", "a copied part with other weights"):
            with torch.no_grad():
                (want, *_), (got, *_) = (each(x.view(4, -1, 2) if name == "cell" else x) for each in (plain, twin))
                self._compare(f"result of {which}", want, got)
                for p in (*plain.parameters(), *twin.parameters()):
                    p.mul_(-0.5)
        if any(torch.equal(p, q) for p, q in zip(part.parameters(), twin.parameters(), strict=True) if p.any()):
            raise WrongError(Problem("shared", "weights of a copied part", f"a copy of {name} writes to the original's weights"))

    def argument(self, number: float) -> None:
        """From now on the model is called with a number."""
        self.given = (number,) * isinstance(self.plain, Guided)

    def backward(self, rows: int, hot: bool, inputs: bool) -> None:
        """Forward and backward; gradients add to those that are there. `inputs`: of the input and the result, too."""
        self._sync()
        self._look_for_gradients()
        x = self._batch(rows, 200.0 if hot else 1.0)

        def run(model: nn.Module, forward: Context) -> Found:
            given = x.clone().requires_grad_(inputs)
            with forward():
                out = model(given, *self.given)
            if not out.requires_grad:
                return {}
            if inputs:
                out.retain_grad()
            self.losses(out.float()).backward()
            found: Found = {"result of a training call": out.detach().float()}
            if inputs:
                found |= {"gradient of the result": out.grad if out.grad is None else out.grad.float(), "gradient of the input": given.grad}
            return found | {f"{LEARNED}: {name}": p.grad for name, p in model.named_parameters()}

        self._judge(run, self.low == "fp16" and self.scaled and (self.known or self.fixed))

    def input_gradient(self, rows: int) -> None:
        """torch.autograd.grad of the result with respect to the input, nothing else."""
        self._sync()
        x = self._batch(rows)

        def run(model: nn.Module, forward: Context) -> Found:
            given = x.clone().requires_grad_()
            with forward():
                out = model(given, *self.given)
            return {"gradient of the input alone": torch.autograd.grad(self.losses(out.float()), given)[0]}

        of_weights = self.overflowed, self.told
        self._judge(run, self.low == "fp16" and (self.known or self.fixed))
        self.overflowed, self.told = of_weights  # the gradients that a step uses are none of these

    def through(self, rows: int) -> None:
        """Another network learns through the frozen rewritten one."""
        self._sync()
        x, stem = self._batch(rows), nn.Linear(WIDTH, WIDTH)
        before = [p.requires_grad for p in self.amp.parameters()]

        def run(model: nn.Module, forward: Context) -> Found:
            for p in model.parameters():
                p.requires_grad_(False)
            stem.zero_grad()
            with forward():
                out = model(stem(x), *self.given)
            self.losses(out.float()).backward()
            return {"gradient through the frozen model": stem.weight.grad}

        flags = self.overflowed, self.told
        self._judge(run, self.low == "fp16" and self.fixed)  # nothing brings such a scale down
        self.overflowed, self.told = flags
        for p, learns in zip(self.amp.parameters(), before, strict=True):
            p.requires_grad_(learns)

    # -- training ---------------------------------------------------------------------------------------------------
    def make_optimizer(self, kind: str, way: str, attach: bool) -> None:
        learning = [p for p in self.amp.parameters() if p.requires_grad]
        if not learning:
            return
        flags = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {}}[way]
        self.optimizer = getattr(torch.optim, kind)(learning, lr=0.1, **flags)
        self.known = True  # if it is not attached, it is found among the objects of the process
        if attach:
            self.amp.attach(self.optimizer)

    def _look_for_gradients(self) -> None:
        """Where all gradients are gone, nothing is left of an overflow; clipped to zeros, they may be gradients that were zeroed."""
        if all(p.grad is None for p in self.amp.parameters()):
            self.overflowed = self.either = False
        elif self.told and self.overflowed and not any(bool(p.grad.any()) for p in self.amp.parameters() if p.grad is not None):
            self.overflowed, self.either = False, True

    def zero_grad(self, to_none: bool) -> None:
        self.amp.zero_grad(set_to_none=to_none)
        self.either = not to_none and not self.told and (self.either or self.overflowed)
        self.overflowed = False

    def step(self, clip: str) -> None:
        """A step on the gradients that are there; one whose gradients overflowed leaves the weights alone."""
        learning = [p for p in self.amp.parameters() if p.requires_grad and p.grad is not None]
        if self.optimizer is None or not learning or not all(p.isfinite().all() for p in learning):
            return
        self._look_for_gradients()
        overflow = any(not p.grad.isfinite().all() for p in learning) or self.overflowed  # type: ignore[union-attr]
        if overflow and not self.scaled:
            return  # whoever wants no loss scale has nothing that skips steps
        if clip == "norm":
            nn.utils.clip_grad_norm_(learning, 1.0)
        elif clip == "value":
            nn.utils.clip_grad_value_(learning, 1.0)
        before, count = [p.detach().clone() for p in learning], self._steps_counted()
        self.optimizer.step()
        self.known = True
        self.told, self.overflowed = True, overflow
        if overflow or not self.either:
            counted = self._steps_counted() != count  # a step of Adagrad after huge gradients moves nothing
            self._check_step(counted or any(not torch.equal(old, p) for old, p in zip(before, learning, strict=True)), learning, overflow)

    def _steps_counted(self) -> float:
        """The steps that the optimizer has counted for all weights together; some count none."""
        assert self.optimizer is not None
        return sum(float(each["step"]) for each in self.optimizer.state.values() if "step" in each)

    def _check_step(self, moved: bool, learning: list[nn.Parameter], overflow: bool) -> None:
        if overflow and moved:
            raise WrongError(Problem("step taken", "after an overflow", "gradients were not finite after backward, and the step was taken"))
        gradients = [p.grad for p in learning if p.grad is not None]
        if not overflow and not moved and any(float(each.abs().max()) > 1e-4 for each in gradients):
            raise WrongError(Problem("step skipped", "without an overflow", "all gradients were finite, and the step was not taken"))
        if not all(p.isfinite().all() for p in learning):
            raise WrongError(Problem("weights", "not finite", "the step made weights that are not finite"))

    def closure(self, kind: str, hot: bool) -> None:
        """An optimizer of its own whose step runs forward and backward."""
        learning = [p for p in self.amp.parameters() if p.requires_grad]
        if not learning or not self.scaled or not all(p.isfinite().all() for p in learning):
            return
        optimizer = Ahead(learning, lr=0.01) if kind == "Ahead" else getattr(torch.optim, kind)(learning, lr=0.01)
        x, before, found = self._batch(4, 200.0 if hot else 1.0), _all_of(learning), []

        def run() -> Tensor:
            found.append(_all_of(learning))
            optimizer.zero_grad()
            loss = self.losses(self.amp(x, *self.given))
            loss.backward()
            return loss

        optimizer.step(run)
        self.known = self.optimizer is not None  # this one is gone
        if not all(p.isfinite().all() for p in learning):
            raise WrongError(Problem("weights", "not finite after a closure", f"{kind}.step(closure) made weights that are not finite"))
        if kind == "Ahead" and before.any() and (len(found) != 1 or torch.equal(found[0], before)):
            raise WrongError(Problem("closure", "before its step", f"{kind}.step had moved the weights, and the closure did not see it"))
        self.zero_grad(True)

    def train_step(self, rows: int, micro: int, clip: str, hot: bool) -> None:
        self.zero_grad(True)
        for _ in range(micro):
            self.backward(rows, hot, False)
        self.step(clip)

    # -- writes -----------------------------------------------------------------------------------------------------
    def write(self, name: str, how: str) -> None:
        """Replace a weight by another, in one of the ways PyTorch offers."""
        name = name if hasattr(self.plain, name) else "first"
        module, key = self.amp.get_submodule(name), "weight_ih_l0" if name == "cell" else "weight"
        weight: nn.Parameter = getattr(module, key)
        new = -weight.detach().clone() if float(weight.detach().abs().max()) > 1e-6 else torch.randn(weight.shape, generator=self.draws)
        if how == "data":
            weight.data.mul_(0).add_(new)
        elif how == "data_assign":
            weight.data = new
        elif how == "data_copy":
            weight.data.copy_(new)
        elif how == "detach":
            weight.detach().copy_(new)
        elif how == "set_":
            with torch.no_grad():
                weight.set_(new)  # type: ignore[call-overload]
        elif how == "swap":
            made = nn.Parameter(new, weight.requires_grad)
            weight.grad = None
            try:
                try:
                    torch.utils.swap_tensors(weight, made)
                except RuntimeError as error:
                    if "AccumulateGrad" not in str(error):
                        raise
                    self.amp.weights_changed()  # a kept copy is a live graph: after `set_` PyTorch swaps no weight that one refers to
                    torch.utils.swap_tensors(weight, made)
                weight._backward_hooks = None  # PyTorch swaps the hooks alone: with the table of those before, later ones would be lost
            except RuntimeError as error:  # PyTorch swaps nothing that guards of compiled code refer to
                if "weakref" not in str(error):
                    raise
        elif how in ("load", "load_assign"):
            state = {key: value.detach().clone() for key, value in self.amp.state_dict().items()}
            state[f"{name}.{key}"] = new
            self.amp.load_state_dict(state, assign=how == "load_assign")
            self.optimizer = None if how == "load_assign" else self.optimizer
        elif how == "parameter":
            setattr(module, key, nn.Parameter(new, weight.requires_grad))
            self.optimizer = None
        elif how == "vector":
            vector = nn.utils.parameters_to_vector([weight]).detach()
            nn.utils.vector_to_parameters(vector * 0 + new.flatten(), [weight])
        elif how == "dlpack":
            torch.from_dlpack(weight.detach()).copy_(new)
        elif how == "numpy":
            weight.detach().numpy()[...] = new.numpy()
        elif how == "inference":
            with torch.inference_mode():
                weight.copy_(new)
        else:
            with torch.no_grad():
                if how == "no_grad":
                    weight.mul_(0).add_(new)
                elif how == "copy_":
                    weight.copy_(new)
                elif how == "foreach":
                    torch._foreach_copy_([weight], [new])
                elif how == "index":
                    weight[:] = new
                else:
                    torch.add(new, 0, out=weight)
        if how in ("load_assign", "swap", "parameter"):
            self._lose_hooks("" if how == "load_assign" else name)
        if how in UNCOUNTED:
            self._uncounted()

    def polyak(self, rate: float) -> None:
        """Move all weights towards others through `.data`, as target networks do."""
        for p in self.amp.parameters():
            p.data.mul_(1 - rate).add_(rate * torch.randn(p.shape, generator=self.draws) * 0.3)
        self._uncounted()

    def merge(self) -> None:
        if hasattr(self.amp, "merge"):
            self.amp.merge()
            self.plain.merge()  # type: ignore[operator]
            self._uncounted()

    def grow(self, name: str) -> None:
        """A weight becomes an ordinary one, whatever it was."""
        with torch.no_grad():
            weight = self.amp.get_submodule(name).weight
            weight.copy_(0.5 * torch.randn(weight.shape, generator=self.draws))  # type: ignore[operator, arg-type]

    # -- structure and modes ------------------------------------------------------------------------------------------
    def mode(self, name: str) -> None:
        self.amp.train(name == "train")

    def freeze(self, name: str, learns: bool) -> None:
        for p in self.amp.get_submodule(name).parameters():
            p.requires_grad_(learns)
            p.grad = None
        self.optimizer = None

    def replace_layer(self, name: str) -> None:
        torch.manual_seed(int(torch.randint(1000, (), generator=self.draws)))
        old: nn.Linear = self.amp.get_submodule(name)  # type: ignore[assignment]
        made = nn.Linear(old.in_features, old.out_features)
        setattr(self.amp, name, made)
        setattr(self.plain, name, copy.deepcopy(made))
        self.optimizer = None

    def hook(self, kind: str) -> None:
        """A hook that changes numbers, on both models."""
        for model in (self.plain, self.amp):
            second = model.get_submodule("second")
            if kind == "forward":
                second.register_forward_hook(_halve_result)
            elif kind == "pre":
                second.register_forward_pre_hook(_shift_input)
            elif kind == "root":
                model.register_forward_hook(_halve_result)
            elif kind == "backward":
                second.register_full_backward_hook(_halve_gradient)

    def parameter_hook(self, name: str, hook: str) -> None:
        self._sync()
        for model in (self.plain, self.amp):
            weight = model.get_submodule(name).weight
            if weight.requires_grad:
                handle = weight.register_hook({"halve": _halve, "clamp": _clamp}[hook])  # type: ignore[operator]
                if model is self.plain:
                    self.hooks.append((name, handle))

    def _lose_hooks(self, of: str = "") -> None:
        """The rewritten model has another tensor for a parameter, or for all: hooks were on the one before."""
        for name, handle in self.hooks:
            if of in ("", name):
                handle.remove()

    def duplicate(self, how: str) -> None:
        """Go on with a copy; what is done to the original afterwards must not be seen."""
        original = self.amp
        if how == "holder":
            holder = copy.deepcopy({"part": original.get_submodule("second"), "net": original})
        self.amp = holder["net"] if how == "holder" else _copied(original, how)
        if how == "holder" and holder["part"] is not self.amp.get_submodule("second"):
            raise WrongError(Problem("torn apart", "a copy of a model and its part", "the part is no module of the copied model"))
        with torch.no_grad():
            for p in original.parameters():
                p.data.zero_()
        self.optimizer, self.known = None, False
        self._lose_hooks()

    def drop(self, learns: bool) -> None:
        """Calls whose results nobody keeps leave no graph behind, with a backward or without one."""

        def call() -> None:
            out = self.amp(Mark.apply(self._batch(4).requires_grad_()), *self.given)
            if learns and out.requires_grad:
                self.losses(out.float()).backward()

        more = growth(call)
        self.zero_grad(True)
        if more:
            raise WrongError(Problem("kept", "graphs of calls", f"two calls leave {more} nodes of their graphs"))

    def finish(self) -> None:
        """Decisions must fit the weights as they are now: a fresh rewrite leaves no fewer heavy ops high."""
        for mode in ("eval", "train"):
            self.mode(mode)
            self.call("grad" if mode == "train" else "no_grad", 4)
        fresh = amprewrite.rewrite(copy.deepcopy(self.plain), **self.options)
        x = self._batch(4)
        fresh(x), self.amp(x)
        regions = (model.plan.regions for model in (self.amp, fresh))  # a fresh rewrite has no graph of the other mode, so count by graph
        own, new = (max(sum(n.colour.value == "high" and n.flops > 0 for n in region.nodes) for region in each) for each in regions)
        if own > new and not self.given:  # a number that has changed is a tensor in the graph, and a constant in a fresh one
            raise WrongError(Problem("stale decision", "heavy ops high", f"{own} heavy ops stay high, a fresh rewrite leaves {new}"))


def generate(seed: int) -> Sequence:
    """The sequence of a seed: 15 to 24 operations."""
    choose = random.Random(seed)
    options: dict[str, Any] = {"dtype": choose.choice(("bf16", "fp16"))}
    if choose.random() < 0.4:
        options["cache_weights"] = choose.choice(("step", "step", False))
    if options["dtype"] == "fp16" and choose.random() < 0.3:
        options["loss_scale"] = choose.choice(("torch", 1024, None))
    if choose.random() < 0.1:
        options["backend"] = "aot_eager"
    layer = lambda: choose.choice(("first", "second", "head"))  # noqa: E731
    written = lambda: choose.choice(("first", "second", "head", "cell"))  # noqa: E731
    sizes = choose.choice(((4,), (4,), (4,), (1,), (4, 6)))
    rows = lambda: choose.choice(sizes)  # noqa: E731
    modes = choose.sample(("grad", "no_grad", "no_grad", "inference", "eval"), 2)
    with_inputs = choose.random() < 0.3
    clip = lambda: choose.choice(("", "", "norm", "value"))  # noqa: E731
    hot = lambda: choose.random() < 0.2  # noqa: E731

    def optimizer() -> tuple[Any, ...]:
        kind = choose.choice(OPTIMIZERS)
        way = choose.choice(
            ("fused", "fused", "foreach", "plain") if kind in FUSED else ("foreach", "plain") if kind != "Adafactor" else ("plain",)
        )
        return kind, way, choose.random() < 0.4

    table: tuple[tuple[str, float, Callable[[], tuple[Any, ...]]], ...] = (
        ("call", 5, lambda: (choose.choice(modes), rows())),
        ("part", 0.7, lambda: (choose.choice(("first", "second")),)),
        ("backward", 1, lambda: (rows(), hot(), with_inputs)),
        ("input_gradient", 0.7, lambda: (rows(),)),
        ("through", 0.7, lambda: (rows(),)),
        ("make_optimizer", 1.2, optimizer),
        ("zero_grad", 0.7, lambda: (choose.random() < 0.5,)),
        ("step", 1, lambda: (clip(),)),
        ("train_step", 3, lambda: (rows(), choose.choice((1, 1, 2)), clip(), hot())),
        ("closure", 0.7, lambda: (choose.choice(("SGD", "AdamW", "LBFGS", "Ahead")), choose.random() < 0.5)),
        ("write", 3, lambda: (written(), choose.choice(WRITES))),
        ("polyak", 0.6, lambda: (0.5,)),
        ("merge", 0.5, lambda: ()),
        ("grow", 0.5, lambda: (layer(),)),
        ("mode", 1, lambda: (choose.choice(("train", "eval")),)),
        ("freeze", 0.7, lambda: (layer(), choose.random() < 0.5)),
        ("replace_layer", 0.5, lambda: (layer(),)),
        ("hook", 0.25, lambda: (choose.choice(("forward", "pre", "root", "backward")),)),
        ("parameter_hook", 0.3, lambda: (layer(), choose.choice(("halve", "clamp")))),
        ("part_copy", 0.7, lambda: (choose.choice(("first", "cell", "normed")), choose.choice(("deepcopy", "pickle")))),
        ("argument", 1, lambda: (choose.choice((1.0, 2.0, 3.0, 3e5, 4e5)),)),
        ("duplicate", 0.4, lambda: (choose.choice(("deepcopy", "pickle", "holder")),)),
    )
    left_out = set(choose.sample(COSTLY, len(COSTLY) - 2))
    names, weights = [row[0] for row in table], [row[1] * (row[0] not in left_out) for row in table]
    makers = {row[0]: row[2] for row in table}
    tiny = choose.random() < 0.1
    operations = [("make_optimizer", optimizer())] if choose.random() < 0.5 else []
    operations += [(name, makers[name]()) for name in choose.choices(names, weights, k=choose.randint(15, 22))]
    if tiny:
        operations += [("grow", ("second",)), ("finish", ())]
    operations += [("drop", (seed % 4 == 0,))] * (seed % 2 == 0)
    net = choose.choice(["Plain", *NETS])
    if net == "Guided" and choose.random() < 0.5:
        options["backend"] = "aot_eager"  # a compiler makes constants of numbers
    return Sequence(seed, net, tiny, tuple(options.items()), tuple(operations))


def check(case: Sequence) -> Problem | None:
    """Run the sequence; the first thing that is wrong."""
    start_clean()
    modes = thread_modes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial = Trial(case.net, case.seed, case.tiny, dict(case.options))
        for index, (name, arguments) in enumerate(case.operations):
            try:
                getattr(trial, name)(*arguments)
            except WrongError as wrong:
                return replace(wrong.problem, at=index)
            except LossScaleError:
                return None
            except Exception as error:
                if any(each in str(error) for each in (TWICE, DONATED)):  # a compiled net of forces that is trained
                    return None
                return replace(failure(error), at=index)
            if (left := left_on(modes)) is not None:
                return replace(left, at=index)
    return None


def cut(case: Sequence, problem: Problem) -> Sequence:
    """The sequence up to the operation that fails."""
    return replace(case, operations=case.operations[: problem.at + 1])


def smaller(case: Sequence) -> Iterator[Sequence]:
    """Sequences with less in them, the boldest first."""
    count = len(case.operations)
    for size in (count // 2, count // 4, 1):
        for start in range(0, count - 1, size) if size else ():
            yield replace(case, operations=case.operations[:start] + case.operations[min(start + size, count - 1) :])
    if case.net != "Plain":
        yield replace(case, net="Plain")
    for name, _ in case.options:
        if name != "dtype":
            yield replace(case, options=tuple(pair for pair in case.options if pair[0] != name))
    if case.tiny:
        yield replace(case, tiny=False)


def shown(case: Sequence) -> str:
    """The sequence as a script; the last line is the one that fails."""
    lines = [f"trial.{name}{arguments if len(arguments) != 1 else f'({arguments[0]!r})'}" for name, arguments in case.operations]
    options = ", ".join(f"{name}={value!r}" for name, value in case.options)
    start = f"trial = Trial({case.net!r}, {case.seed}, {case.tiny}, dict({options}))"
    return "\n".join(["from tests.fuzz.states import Trial", "", start, *lines, ""])
