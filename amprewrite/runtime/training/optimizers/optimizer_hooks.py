"""Hooks on the `step` of one optimizer, which skip its overflowing steps. Nothing else of it is changed.

Before each step:

1. Look for inf and NaN in the gradients of all the optimizer's parameters, as torch.amp.GradScaler does
   (torch/amp/grad_scaler.py), with the same multi-tensor kernel; add what backwards left in them that still counts
   (backwards.py); agree with the ranks that hold the other shards (nonfinite.py).
2. Tell the gates, whose loss scales move once per set of steps (loss_scale.py). A scale that was not used does not move.
3. A fused optimizer gets the answer as its `found_inf` tensor and skips by itself: no host sync.
4. For any other optimizer read the answer.  To skip, step a stand-in: a hook may replace the arguments of
   `Optimizer.step`, `self` among them, so the class's own code runs once over no parameter groups and a throw-away state.
   Parameters, state, step counts and gradients of the real one stay the same, and its scheduler sees a step.
5. With a closure the gradients are the closure's (closures.py).
6. Tell wrappers that hold a schedule how it went (wrappers.py). They want to know at once, so then a fused step is read, too.

The optimizer's state_dict carries the loss scales (carried_scale.py).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amprewrite.runtime.training.backwards import Noted
from amprewrite.runtime.training.loss_scale import LossScale
from amprewrite.runtime.training.nonfinite import find_nonfinite
from amprewrite.runtime.training.optimizers.carried_scale import Arrived, save
from amprewrite.runtime.training.optimizers.closures import Checked, Evaluated, guarded_closure, params_of
from amprewrite.runtime.training.optimizers.find_optimizers import in_a_step
from amprewrite.runtime.training.optimizers.grad_scalers import refuse_grad_scaler
from amprewrite.runtime.training.optimizers.wrappers import tell, wrappers_above

_SAVES = "_optimizer_state_dict_post_hooks"
_FRAMES = 12
"""How far up the stack to look for who called `step`."""


class Gate(Protocol):
    """The members of a StepGate that a guard uses."""

    loss_scale: LossScale
    parameters: Callable[[], Iterable[Tensor]]

    def noted(self, optimizer: Optimizer) -> Noted: ...

    @property
    def ran_unscaled(self) -> bool: ...

    def stepped(self, optimizer: Optimizer, overflow: bool | None) -> None: ...


def guard_of(optimizer: Optimizer) -> Guard:
    """The guard of `optimizer`, which hangs on its hooks from the first call on until its last gate is gone."""
    guard = _GUARDS.get(optimizer)
    if guard is None:
        guard = _GUARDS[optimizer] = Guard(optimizer)
    return guard


def step_was_skipped(optimizer: Optimizer) -> bool:
    """Whether the latest step of an optimizer was skipped (a host read after a fused one); False if nothing guards it."""
    guard = _GUARDS.get(optimizer)
    return guard is not None and guard.skipped


class Guard:
    """The hooks on one optimizer; several gates share them, so that gradients are checked once and all gates agree."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._refs: list[weakref.ref[Gate]] = []
        self._found: Tensor | None = None
        self._closure: Evaluated | Checked | None = None
        self._warm: tuple[int, int, int] | None = None
        self._beside: list[Any] = []
        """Process groups whose ranks step other parts of one model together with this optimizer."""
        self._latest: bool | Tensor = False
        self._arrived = Arrived()
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hooks = [optimizer.register_step_pre_hook(self.before), optimizer.register_step_post_hook(self.after)]
        if _SAVES in optimizer.__dict__:  # without it the class has a state_dict of its own, and never called Optimizer.__init__
            self._hooks.append(optimizer.register_state_dict_post_hook(self._saved))
            self._hooks.append(optimizer.register_load_state_dict_post_hook(self._loaded))

    def add(self, gate: Gate) -> None:
        """Guard the optimizer for `gate`, too."""
        if not any(ref() is gate for ref in self._refs):
            self._refs.append(weakref.ref(gate, functools.partial(_gate_died, weakref.ref(self))))
        self.resume()

    def agree_with(self, group: Any) -> None:
        """Skip whenever an optimizer on another rank of `group` skips."""
        if group not in self._beside:
            self._beside.append(group)

    def resume(self) -> None:
        """Load the loss scales that came with a checkpoint of the optimizer, if one did."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self._arrived.resume(optimizer, self._scales())

    @property
    def skipped(self) -> bool:
        """Whether the latest step was skipped (a host read after a fused one)."""
        return self._latest if isinstance(self._latest, bool) else self._latest.item() > 0

    def _scales(self) -> list[LossScale]:
        return list({id(gate.loss_scale): gate.loss_scale for gate in self.gates()}.values())

    def _saved(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        save(self._scales(), state)

    def _loaded(self, optimizer: Optimizer) -> None:
        self.resume()

    def remove(self, gate: Gate) -> None:
        """Stop guarding the optimizer for `gate`."""
        for ref in [each for each in self._refs if each() is gate]:
            self.drop(ref)

    def drop(self, ref: weakref.ref[Gate]) -> None:
        """Forget a gate that died or was retired; with the last one the hooks go."""
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

    def share(self, gate: Gate) -> list[Tensor]:
        """The parameters of this optimizer that `gate` looks after: its model's own, and those of no other gate's model."""
        optimizer = self._optimizer()
        params = [] if optimizer is None else list(params_of(optimizer))
        others = {id(p) for other in self.gates() if other is not gate for p in other.parameters()}
        if not others:
            return params
        own = {id(p) for p in gate.parameters()}
        return [p for p in params if id(p) in own or id(p) not in others]

    def look(self, optimizer: Optimizer) -> Tensor | None:
        """A flag for the gradients now and for earlier backwards that still count; None without gradients."""
        params = list(params_of(optimizer))
        noted = [flag for gate in self.gates() for flag in gate.noted(optimizer).due(params)]
        return find_nonfinite(params, noted, self._beside)

    def gates(self) -> list[Gate]:
        """The gates that still live and scale anything."""
        return [gate for ref in self._refs if (gate := ref()) is not None and gate.loss_scale.enabled]

    @torch.compiler.disable
    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gates = self.gates()
        caller = _running_step(optimizer)
        if not gates or _is_inner_step(caller, optimizer):
            return None
        self._clear(optimizer)
        refuse_grad_scaler(optimizer, caller, kwargs)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if callable(closure):
            return self._before_closure(optimizer, args, kwargs, closure)
        found = self.look(optimizer)
        wrappers = list(wrappers_above(caller, optimizer))
        if found is None:
            self._went(False, wrappers)
            return None
        fused = self._skips_by_itself(optimizer)
        overflow = None if fused and not wrappers else found.item() > 0
        self._went(found if overflow is None else overflow, wrappers)
        self._tell(gates, optimizer, found, overflow)
        if fused:
            self._found = optimizer.found_inf = found  # type: ignore[attr-defined]
            return None
        return ((_stand_in(optimizer), *args[1:]), kwargs) if overflow else None

    def _before_closure(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._closure = guarded = guarded_closure(optimizer, closure, self.look)
        if guarded.idles:
            args = (_stand_in(optimizer), *args[1:])
        if "closure" in kwargs:
            return args, {**kwargs, "closure": guarded}
        return (args[0], guarded, *args[2:]), kwargs

    @torch.compiler.disable
    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caller = _running_step(optimizer)
        if _is_inner_step(caller, optimizer):
            return
        closure = self._closure
        self._clear(optimizer)
        if closure is None:
            return
        self._went(closure.overflow, list(wrappers_above(caller, optimizer)))
        if closure.found is None:
            return
        if closure.overflow:
            closure.rewind()
        self._tell(self.gates(), optimizer, closure.found, closure.overflow)

    def _went(self, skipped: bool | Tensor, wrappers: list[Any]) -> None:
        """Keep how a step went, and tell the wrappers that ask."""
        self._latest = skipped
        for wrapper in wrappers:
            tell(wrapper, self.skipped)
            self._told.add(wrapper)

    def _tell(self, gates: list[Gate], optimizer: Optimizer, found: Tensor, overflow: bool | None) -> None:
        params = list(params_of(optimizer))
        for gate in gates:
            gate.noted(optimizer).heard(found, overflow, params)
        unused = {id(gate.loss_scale) for gate in gates if gate.ran_unscaled}
        for scale in {id(gate.loss_scale): gate.loss_scale for gate in gates}.values():
            if id(scale) not in unused:
                scale.observe(found, source=id(optimizer))
        for gate in gates:
            gate.stepped(optimizer, overflow)

    def _skips_by_itself(self, optimizer: Optimizer) -> bool:
        """Whether its kernel heeds `found_inf`, and has its state: a first step that is skipped must not make one.

        (torch's fused SGD even leaves momentum uninitialised then: torch/optim/sgd.py makes it with `empty_like`.)
        """
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        active = [
            p for group in optimizer.param_groups if group.get("momentum") != 0 for p in group["params"] if p.grad is not None
        ]
        seen = (id(optimizer.state), len(optimizer.state), len(active))
        if self._warm != seen:
            if not all(any(value is not None for value in optimizer.state.get(p, {}).values()) for p in active):
                return False
            self._warm = seen
        return True

    def _clear(self, optimizer: Optimizer) -> None:
        if self._found is not None and getattr(optimizer, "found_inf", None) is self._found:
            del optimizer.found_inf  # type: ignore[attr-defined]
        self._found = self._closure = None


class _NoGroups(list[dict[str, Any]]):
    """Parameter groups that loops do not see; code that looks up settings by index finds them."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _stand_in(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class with nothing to do, for one step."""
    idle = object.__new__(type(optimizer))
    for name, value in optimizer.__dict__.items():
        if isinstance(value, Optimizer):
            value = _stand_in(value)
        elif isinstance(value, list) and value and all(isinstance(each, Optimizer) for each in value):
            value = [_stand_in(each) for each in value]
        elif isinstance(value, list) and value and all(isinstance(each, Tensor) for each in value):
            value = []
        elif isinstance(value, OrderedDict) and name.endswith("_hooks"):
            value = OrderedDict()
        idle.__dict__[name] = value
    idle.__dict__.pop("step", None)  # a scheduler's, bound to the real one
    if type(optimizer).__module__.startswith("torch."):
        idle.param_groups = []  # torch's own optimizers look up no group by index, and Dynamo needs a plain list to compile the step
    else:
        idle.param_groups = _NoGroups({**group, "params": []} for group in optimizer.param_groups)
    idle.state = defaultdict(dict)
    idle._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
    return idle


_GUARDS: weakref.WeakKeyDictionary[Optimizer, Guard] = weakref.WeakKeyDictionary()


def _gate_died(guard: weakref.ref[Guard], ref: weakref.ref[Gate]) -> None:
    living = guard()
    if living is not None:
        living.drop(ref)


def _running_step(optimizer: Optimizer) -> FrameType:
    """The frame of the `step`, as torch.optim wraps it, whose hook is being called."""
    frame = hook = sys._getframe(1)
    code = getattr(type(optimizer).step, "__code__", None)
    for _ in range(_FRAMES):
        if frame.f_code is code or frame.f_back is None:
            return frame
        frame = frame.f_back
    return hook


def _is_inner_step(caller: FrameType, optimizer: Optimizer) -> bool:
    """Whether `step` was called by a subclass's `step` of the same optimizer, which has been guarded already."""
    frame = caller.f_back
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code is caller.f_code and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False
