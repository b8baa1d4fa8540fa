"""Hook the `step` of an optimizer, and skip the step if gradients overflowed. Nothing else about the optimizer changes.

Before each step:

1. Check the gradients of all parameters of the optimizer for inf and NaN, as torch.amp.GradScaler does (torch/amp/grad_scaler.py), with
   the same multi-tensor kernel. Combine the result with the flags of earlier backward passes (step_record.py) and with the
   results of the ranks that hold the other shards (nonfinite.py).
2. Pass this flag to the StepRecord of each model that the optimizer trains. The model's loss scale is updated once for all optimizers that
   step between two forwards (loss_scale.py). It is not updated if the gradients come from a forward that used 1 instead of it.
3. Give the flag to a fused optimizer as its `found_inf` tensor. Its kernel skips the step, without a host sync.
4. For any other optimizer read the flag. To skip a step of one of torch.optim's own optimizers, the hook replaces the argument `self` of
   `Optimizer.step` by a stand-in without parameters and with a temporary state. A step of any other class might fail without parameters,
   or find them outside `param_groups`. So it runs on gradients of zero and is undone afterwards (`Idle`). In both cases parameters,
   state, step counts and gradients stay the same, and the learning-rate scheduler sees that `step` was called.
5. If the step has a closure, check the gradients that the closure computes (closures.py).
6. Tell wrappers that control a schedule whether the step was skipped, so that they do not advance it after a skipped step. accelerate's
   AcceleratedOptimizer stores whether a GradScaler skipped the step in `_is_overflow`, and its schedulers and transformers' Trainer read
   this attribute. A wrapper needs the answer now, so in this case the flag of a fused optimizer is read as well.

The optimizer's state_dict includes the loss scales, so that code that saves and loads the optimizer also resumes them (class `Arrived`).
"""

from __future__ import annotations

import functools
import operator
import sys
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amprewrite.graphs.fx.weights.step_listeners import in_a_step
from amprewrite.runtime.training.loss_scale import LossScale
from amprewrite.runtime.training.nonfinite import find_nonfinite, params_of
from amprewrite.runtime.training.optimizers.closures import Checked, Evaluated, Idle, guarded_closure
from amprewrite.runtime.training.optimizers.scale_mistakes import refuse_grad_scaler
from amprewrite.runtime.training.step_record import StepRecord
from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.errors import AmpRewriteWarning, PolicyError

_SAVES = "_optimizer_state_dict_post_hooks"
_FUSED = operator.methodcaller("get", "fused", True)
"""Returns the setting "fused" of a parameter group; True if it has none. A loaded checkpoint may have set it to False in some groups."""


def guard_of(optimizer: Optimizer) -> Guard:
    """Return the `Guard` of `optimizer`, which hooks its steps. The first call makes it, and it lasts until no model needs it any more."""
    guard = _GUARDS.get(optimizer)
    if guard is None:
        guard = _GUARDS[optimizer] = Guard(optimizer)
    return guard


def step_was_skipped(optimizer: Optimizer) -> bool:
    """True if hooks skipped the latest step of `optimizer`; False if it has no hooks. Causes a host sync if the optimizer is fused."""
    guard = _GUARDS.get(optimizer)
    return guard is not None and guard.skipped


class Guard:
    """The hooks on one optimizer. They check gradients before each step, and skip a step whose gradients overflowed.

    A gate is the StepRecord of one model. If the optimizer trains several models, gradients are checked once for all their gates.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._refs: list[weakref.ref[StepRecord]] = []
        self._found: Tensor | None = None
        self._closure: Evaluated | Checked | None = None
        self._idle: Idle | None = None
        self._warm: tuple[int, int, tuple[int, ...]] | None = None
        self._beside: list[Any] = []
        """Process groups whose ranks step other parts of the model together with this optimizer."""
        self._latest: bool | Tensor = False
        self._arrived = Arrived()
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hooks = [optimizer.register_step_pre_hook(self.before), optimizer.register_step_post_hook(self.after)]
        if _SAVES in optimizer.__dict__:  # an optimizer that never called Optimizer.__init__ lacks this attribute
            self._hooks.append(optimizer.register_state_dict_post_hook(self._saved))
            self._hooks.append(optimizer.register_load_state_dict_post_hook(self._loaded))

    def add(self, gate: StepRecord) -> None:
        """From now on, check gradients for the model of `gate` before a step. Load the model's loss scale if a checkpoint had one."""
        if not any(ref() is gate for ref in self._refs):
            self._refs.append(weakref.ref(gate, functools.partial(_gate_died, weakref.ref(self))))
        self.resume()

    def agree_with(self, group: Any) -> None:
        """From now on, skip each step that another rank of the process group `group` skips."""
        if group not in self._beside:
            self._beside.append(group)

    def resume(self) -> None:
        """Load the loss scales from the latest checkpoint of the optimizer, if it has any that are not loaded yet."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self._arrived.resume(optimizer, self._scales)

    @property
    def skipped(self) -> bool:
        """True if the latest step was skipped. Causes a host sync after a step of a fused optimizer."""
        return self._latest if isinstance(self._latest, bool) else self._latest.item() > 0

    def _scales(self) -> list[LossScale]:
        return list({id(gate.loss_scale): gate.loss_scale for gate in self.gates()}.values())

    def _saved(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        save(self._scales(), state)

    def _loaded(self, optimizer: Optimizer) -> None:
        self.resume()

    def remove(self, gate: StepRecord) -> None:
        """Undo `add`: stop checking gradients for the model whose StepRecord is `gate`."""
        for ref in [each for each in self._refs if each() is gate]:
            self.drop(ref)

    def drop(self, ref: weakref.ref[StepRecord]) -> None:
        """Forget the StepRecord of a model that no longer exists or is no longer rewritten.

        If no StepRecord is left, remove the hooks, unless a step is running.
        """
        self._refs = [each for each in self._refs if each is not ref]
        if self._refs or in_a_step():
            return
        for hook in self._hooks:
            hook.remove()
        for wrapper in self._told:
            tell(wrapper, False)
        optimizer = self._optimizer()
        if optimizer is not None:
            _GUARDS.pop(optimizer, None)

    def share(self, gate: StepRecord) -> list[Tensor]:
        """Return the parameters of this optimizer except what belongs only to other guarded models. A separate head's are included."""
        optimizer = self._optimizer()
        params = [] if optimizer is None else params_of(optimizer)
        if len(self._refs) == 1:  # only `gate`: no other model shares the optimizer
            return params
        others = {id(p) for other in self.gates() if other is not gate for p in other.parameters()}
        own = {id(p) for p in gate.parameters()}
        return [p for p in params if id(p) in own or id(p) not in others]

    def look(self, optimizer: Optimizer, gates: list[StepRecord], params: list[Tensor]) -> Tensor | None:
        """Return the overflow flag of a step: above 0 if gradients hold inf or NaN now, or held them after an earlier backward.

        Returns None if there is nothing to check. `gates`: the StepRecords of the guarded models. `params`: the parameters of `optimizer`.
        """
        noted = list[Tensor]()
        for gate in gates:
            noted += gate.noted(optimizer).due(params)
        return find_nonfinite(params, noted, self._beside)

    def gates(self) -> list[StepRecord]:
        """Return the StepRecords of the models that still exist and whose loss scale is enabled."""
        found = []
        for ref in self._refs:
            gate = ref()
            if gate is not None and gate.loss_scale.enabled:
                found.append(gate)
        return found

    @torch.compiler.disable
    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check gradients before a step, and report the result to the StepRecord of each model that the optimizer trains.

        PyTorch calls this hook with the arguments of `step`. The hook returns new (args, kwargs) for the step, or None to keep them. A
        step is skipped in one of three ways: the hook puts a stand-in without parameters into `args`, `after` undoes the step, or a fused
        kernel reads `found_inf`. A closure is wrapped to check its gradients. Raises LossScaleError if a GradScaler makes the step.
        """
        gates, frames = self.gates(), frames_of_step(optimizer)
        if not (gates and frames):
            return None
        if self._found is not None or self._closure is not None or self._idle is not None:  # the previous step raised an error
            self._clear(optimizer)
        refuse_grad_scaler(optimizer, frames, kwargs)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        # an nn.Module is no closure: some steps take the model as their first argument
        if callable(closure) and not isinstance(closure, torch.nn.Module):
            return self._before_closure(optimizer, args, kwargs, closure)
        params = params_of(optimizer)
        found = self.look(optimizer, gates, params)
        wrappers = wrappers_among(frames, optimizer)
        if found is None:
            self._went(False, wrappers)
            return None
        fused = getattr(optimizer, "_step_supports_amp_scaling", False) and all(map(_FUSED, optimizer.param_groups))
        fused = fused and self._skips_by_itself(optimizer)
        overflow = None if fused and not wrappers else found.item() > 0
        self._went(found if overflow is None else overflow, wrappers)
        self._tell(gates, optimizer, params, found, overflow)
        if fused:
            self._found = optimizer.found_inf = found  # type: ignore[attr-defined]
            return None
        return ((self._skip(optimizer), *args[1:]), kwargs) if overflow else None

    def _before_closure(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._closure = guarded = guarded_closure(optimizer, closure, lambda each: self.look(each, self.gates(), params_of(each)))
        if guarded.idles:
            args = (self._skip(optimizer), *args[1:])
        if "closure" in kwargs:
            return args, {**kwargs, "closure": guarded}
        return (args[0], guarded, *args[2:]), kwargs

    def _skip(self, optimizer: Optimizer) -> Optimizer:
        """Return the object that the running `step` gets as `self` in place of `optimizer`, so that the step is skipped.

        For a class of torch.optim it is a stand-in without parameters. For others it is `optimizer` itself: its gradients are set to zero,
        and `after` undoes the step.
        """
        if type(optimizer).__module__.startswith("torch.optim."):
            return _stand_in(optimizer)
        self._idle = Idle(optimizer)
        return optimizer

    @torch.compiler.disable
    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Undo a step that ran although gradients overflowed (`Idle`, `Checked`): restore weights and state. PyTorch calls it after `step`.

        Also deletes the `found_inf` that `before` set on the optimizer, and reports a step with a closure to the models' StepRecords.
        """
        if self._found is None and self._closure is None and self._idle is None:
            return
        frames = frames_of_step(optimizer)
        if not frames:
            return
        closure, idle = self._closure, self._idle
        self._clear(optimizer)
        if idle is not None:
            idle.rewind()
        if closure is None:
            return
        self._went(closure.overflow, wrappers_among(frames, optimizer))
        if closure.found is None:
            return
        if closure.overflow:
            closure.rewind()
        kept = params_of(optimizer) if closure.idles else []  # gradients of a skipped step remain; `Checked` sets overflowed ones to zero
        self._tell(self.gates(), optimizer, kept, closure.found, closure.overflow)

    def _went(self, skipped: bool | Tensor, wrappers: list[Any]) -> None:
        """Store whether the latest step was skipped, here and in the optimizer's `wrappers`. `skipped`: a bool, or an overflow flag."""
        self._latest = skipped
        for wrapper in wrappers:
            tell(wrapper, self.skipped)
            self._told.add(wrapper)

    def _tell(self, gates: list[StepRecord], optimizer: Optimizer, params: list[Tensor], found: Tensor, overflow: bool | None) -> None:
        """Report a step to `gates`, and once to each of their loss scales. A scale gets no report if a forward used 1 instead of it.

        `found`: the overflow flag of the step. `overflow`: its value, None if the host has not read it. `params`: parameters whose
        gradients still exist after the step.
        """
        unused = set[int]()
        for gate in gates:
            gate.noted(optimizer).heard(found, overflow, params)
            if gate.use.unscaled:
                unused.add(id(gate.loss_scale))
        for gate in gates:
            if id(gate.loss_scale) not in unused:
                gate.loss_scale.observe(found, source=id(optimizer))
                unused.add(id(gate.loss_scale))  # several models may share one loss scale: report the step once
        for gate in gates:
            gate.stepped(optimizer, overflow)

    def _skips_by_itself(self, optimizer: Optimizer) -> bool:
        """True if a fused optimizer's kernel can skip the step without harm: all parameters with gradients have optimizer state already.

        In a parameter's first step, torch creates the state even if the kernel then skips the step. Fused SGD would leave the momentum
        uninitialised: torch/optim/sgd.py makes it with `empty_like`. Parameter groups with momentum=0 are not examined, as they need none.
        """
        active = [p for group in optimizer.param_groups if group.get("momentum") != 0 for p in group["params"] if p.grad is not None]
        seen = (id(optimizer.state), len(optimizer.state), tuple(map(id, active)))
        if self._warm != seen:
            if not all(any(value is not None for value in optimizer.state.get(p, {}).values()) for p in active):
                return False
            self._warm = seen
        return True

    def _clear(self, optimizer: Optimizer) -> None:
        if self._found is not None and getattr(optimizer, "found_inf", None) is self._found:
            del optimizer.found_inf  # type: ignore[attr-defined]
        self._found = self._closure = self._idle = None


def _stand_in(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class with no parameters and an empty state. It steps in place of `optimizer` and changes nothing.

    Only for classes of torch.optim, whose `step` works without groups. LBFGS needs groups, but gets no stand-in: `after` undoes its steps.
    """
    idle = object.__new__(type(optimizer))
    for name, value in optimizer.__dict__.items():
        idle.__dict__[name] = OrderedDict() if isinstance(value, OrderedDict) and name.endswith("_hooks") else value
    idle.__dict__.pop("step", None)  # a scheduler may have stored a `step` here that is bound to the real optimizer
    idle.param_groups, idle.state = [], defaultdict(dict)
    idle._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
    return idle


_GUARDS: weakref.WeakKeyDictionary[Optimizer, Guard] = weakref.WeakKeyDictionary()


def _gate_died(guard: weakref.ref[Guard], ref: weakref.ref[StepRecord]) -> None:
    living = guard()
    if living is not None:
        living.drop(ref)


_ANSWER = "_is_overflow"
"""Attribute of an optimizer's wrapper, such as accelerate's, that says whether the latest step was skipped."""
_MOST_WRAPPERS = 5
_MOST = 12
"""Largest number of stack frames that are searched for the frame of `step`. As many more are searched for its callers."""


def frames_of_step(optimizer: Optimizer) -> list[FrameType]:
    """Return the stack frame of the running `step`, then the frames of its callers. Call this from a hook of that step.

    torch wraps the `step` of every optimizer class, and the first frame is the wrapper's.
    Returns [] if another `step` of the same optimizer called this one, as with `super().step()`: only the outer step's hooks must act.
    """
    frame = hook = sys._getframe(1)
    code = getattr(type(optimizer).step, "__code__", None)
    for _ in range(_MOST):
        if frame.f_code is code or frame.f_back is None:
            break
        frame = frame.f_back
    else:
        frame = hook
    found = [frame]
    while frame.f_back is not None and len(found) <= _MOST:
        frame = frame.f_back
        if frame.f_code is found[0].f_code and frame.f_locals.get("self") is optimizer:
            return []
        found.append(frame)
    return found


def wrappers_among(frames: list[FrameType], optimizer: Optimizer) -> list[Any]:
    """Return the wrappers of `optimizer` whose `step` is running in one of `frames`, the innermost first."""
    found = []
    for frame in frames:
        each = frame.f_locals.get("self") if frame.f_code.co_name == "step" else optimizer
        if each is not optimizer and hasattr(each, _ANSWER) and _wraps(each, optimizer):
            found.append(each)
    return found


def _wraps(found: Any, optimizer: Optimizer) -> bool:
    for _ in range(_MOST_WRAPPERS):
        found = getattr(found, "optimizer", None)
        if found is optimizer:
            return True
    return False


def tell(wrapper: Any, skipped: bool) -> None:
    """Store in `wrapper` whether the latest step was skipped."""
    setattr(wrapper, _ANSWER, skipped)


KEY = "amprewrite_loss_scale"
"""Key in the first parameter group of an optimizer's state_dict. Its value is a list: the state_dict of each loss scale."""

Brought = tuple["weakref.ref[Optimizer]", Any]
_BROUGHT: weakref.WeakKeyDictionary[LossScale, Brought] = weakref.WeakKeyDictionary()
"""For each scale that was loaded: the optimizer whose checkpoint brought the latest state, and this state."""


def save(scales: Sequence[LossScale], state: dict[str, Any]) -> None:
    """Add the states of the loss scales `scales` to `state`, an optimizer's state_dict. Do nothing if no scale is dynamic."""
    groups = state.get("param_groups")
    if groups and any(scale.kind == "dynamic" for scale in scales):
        groups[0][KEY] = [scale.state_dict() for scale in scales]


class Arrived:
    """Keeps the loss-scale states from the checkpoint of one optimizer, until `resume` gets the `LossScale` objects to load them into.

    When torch loads a checkpoint, it copies these states into the optimizer's first parameter group. `resume` takes them from there: when
    the optimizer is loaded, when it is guarded, and before each forward of a model that it trains. The states have the order in which
    these models were added to the `Guard`. If several optimizers step parts of one model, their checkpoints hold the same state. It is
    loaded only once, because the scale may have changed before the next optimizer brings it again. A static scale warns and ignores it.
    """

    def __init__(self) -> None:
        self._states: dict[int, Any] = {}

    def resume(self, optimizer: Optimizer, scales_of: Callable[[], Sequence[LossScale]]) -> None:
        """Move a checkpoint's loss-scale states, if any, from the optimizer's first parameter group into its loss scales, in order.

        `scales_of` returns the scales of the models that the optimizer trains. A state for which there is no scale yet is kept.
        Raises PolicyError if a state or the list of states is invalid. Warns if a state belongs to a scale that is not dynamic.
        """
        if optimizer.param_groups and KEY in optimizer.param_groups[0]:
            found = optimizer.param_groups[0].pop(KEY)
            if not isinstance(found, list | tuple):
                raise PolicyError(f"{KEY} in the optimizer's first parameter group holds {shown(found)}; it must be a list of states")
            self._states = dict(enumerate(found))
        if not self._states:
            return
        scales = scales_of()
        for place in [place for place in self._states if place < len(scales)]:
            _load(scales[place], self._states.pop(place), optimizer)


def _load(scale: LossScale, state: Any, optimizer: Optimizer) -> None:
    if scale.kind != "dynamic":
        warnings.warn(
            f"the checkpoint of this {type(optimizer).__name__} has a loss scale, which is left out: this model's own is {scale!r}",
            AmpRewriteWarning,
            stacklevel=2,
        )
        return
    earlier = _BROUGHT.get(scale)
    bringer = None if earlier is None else earlier[0]()
    if earlier is None or bringer is None or earlier[1] != state or not _share_nothing(bringer, optimizer):
        scale.load_state_dict(state)
        _BROUGHT[scale] = weakref.ref(optimizer), state


def _share_nothing(one: Optimizer, other: Optimizer) -> bool:
    """True if the two optimizers have no parameter in common."""
    return {*map(id, params_of(one))}.isdisjoint(map(id, params_of(other)))
