"""Hooks the `step` of one optimizer and skips it if gradients overflowed. Nothing else about the optimizer is changed.

Before each step:

1. Check the gradients of all parameters of the optimizer for inf and NaN, as torch.amp.GradScaler does (torch/amp/grad_scaler.py), with
   the same multi-tensor kernel. Combine the result with the flags of earlier backwards that still count (backwards.py) and with the
   results of the ranks that hold the other shards (nonfinite.py).
2. Pass this flag to the gates, one for each model that the optimizer trains. Their loss scales are updated once per set of steps
   (loss_scale.py). A scale is not updated if the gradients come from a forward that used 1 in its place.
3. Give the flag to a fused optimizer as its `found_inf` tensor. Its kernel skips the step, without a host sync.
4. For any other optimizer read the flag. To skip the step, let a stand-in make it: a hook may replace the arguments of `Optimizer.step`,
   including `self`, so the code of the class runs once, with no parameters and a temporary state. Parameters, state, step counts and
   gradients of the real optimizer stay the same, and its learning-rate scheduler sees that `step` was called.
5. If the step has a closure, check the gradients that the closure computes (closures.py).
6. Tell wrappers that control a schedule whether the step was skipped (callers.py). A wrapper needs the answer now, so in this case the flag
   of a fused optimizer is read as well.

The optimizer's state_dict includes the loss scales (carried_scale.py).
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amprewrite.graphs.fx.weights.step_listeners import in_a_step
from amprewrite.runtime.training.loss_scale import LossScale
from amprewrite.runtime.training.nonfinite import find_nonfinite, params_of
from amprewrite.runtime.training.optimizers.callers import frames_of_step, tell, wrappers_among
from amprewrite.runtime.training.optimizers.carried_scale import Arrived, save
from amprewrite.runtime.training.optimizers.closures import Checked, Evaluated, guarded_closure
from amprewrite.runtime.training.optimizers.grad_scalers import refuse_grad_scaler
from amprewrite.runtime.training.step_record import StepRecord

_SAVES = "_optimizer_state_dict_post_hooks"

def guard_of(optimizer: Optimizer) -> Guard:
    """Return the guard (the hooks) of `optimizer`. The first call sets the hooks, which stay until no model needs them any more."""
    guard = _GUARDS.get(optimizer)
    if guard is None:
        guard = _GUARDS[optimizer] = Guard(optimizer)
    return guard


def step_was_skipped(optimizer: Optimizer) -> bool:
    """True if the latest step of `optimizer` was skipped. False if nothing guards it. Syncs with the device if the optimizer is fused."""
    guard = _GUARDS.get(optimizer)
    return guard is not None and guard.skipped


class Guard:
    """The hooks on one optimizer, which check gradients before a step and skip the step if they overflowed.

    A gate is the StepRecord of one model. If the optimizer trains several models, gradients are checked once for all their gates.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._refs: list[weakref.ref[StepRecord]] = []
        self._found: Tensor | None = None
        self._closure: Evaluated | Checked | None = None
        self._warm: tuple[int, int, int] | None = None
        self._beside: list[Any] = []
        """Process groups whose ranks step other parts of the model at the same time as this optimizer."""
        self._latest: bool | Tensor = False
        self._arrived = Arrived()
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hooks = [optimizer.register_step_pre_hook(self.before), optimizer.register_step_post_hook(self.after)]
        if _SAVES in optimizer.__dict__:  # an optimizer that never called Optimizer.__init__ lacks this attribute
            self._hooks.append(optimizer.register_state_dict_post_hook(self._saved))
            self._hooks.append(optimizer.register_load_state_dict_post_hook(self._loaded))

    def add(self, gate: StepRecord) -> None:
        """Guard the optimizer for one more model, whose StepRecord is `gate`. Load a loss scale that a checkpoint has brought for it."""
        if not any(ref() is gate for ref in self._refs):
            self._refs.append(weakref.ref(gate, functools.partial(_gate_died, weakref.ref(self))))
        self.resume()

    def agree_with(self, group: Any) -> None:
        """From now on, skip each step that the optimizer of any other rank in `group` skips."""
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
        """Stop guarding the optimizer for the model of `gate`."""
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
        """Return the parameters of this optimizer, except parameters of other models that do not also belong to the model of `gate`."""
        optimizer = self._optimizer()
        params = [] if optimizer is None else params_of(optimizer)
        if len(self._refs) == 1:  # only `gate`: no other model shares the optimizer
            return params
        others = {id(p) for other in self.gates() if other is not gate for p in other.parameters()}
        own = {id(p) for p in gate.parameters()}
        return [p for p in params if id(p) in own or id(p) not in others]

    def look(self, optimizer: Optimizer, gates: list[StepRecord], params: list[Tensor]) -> Tensor | None:
        """Return a flag: above 0 if gradients hold inf or NaN, or a flag of an earlier backward counts at this step (`Noted.due`).

        None if there is nothing to check. `gates` are the StepRecords of the guarded models, `params` the parameters of `optimizer`.
        """
        noted = list[Tensor]()
        for gate in gates:
            noted += gate.noted(optimizer).due(params)
        return find_nonfinite(params, noted, self._beside)

    def gates(self) -> list[StepRecord]:
        """Return the StepRecords of models that still exist and whose loss scale is enabled."""
        found = []
        for ref in self._refs:
            gate = ref()
            if gate is not None and gate.loss_scale.enabled:
                found.append(gate)
        return found

    @torch.compiler.disable
    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check gradients before a step, and report the result to the StepRecord of each model that the optimizer trains.

        Returns new (args, kwargs) for the step, if it must be skipped or get another closure; None otherwise. Raises LossScaleError if a
        GradScaler makes the step.
        """
        gates, frames = self.gates(), frames_of_step(optimizer)
        if not (gates and frames):
            return None
        if self._found is not None or self._closure is not None:
            self._clear(optimizer)
        refuse_grad_scaler(optimizer, frames, kwargs)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if callable(closure):
            return self._before_closure(optimizer, args, kwargs, closure)
        params = params_of(optimizer)
        found = self.look(optimizer, gates, params)
        wrappers = wrappers_among(frames, optimizer)
        if found is None:
            self._went(False, wrappers)
            return None
        fused = getattr(optimizer, "_step_supports_amp_scaling", False) and self._skips_by_itself(optimizer)
        overflow = None if fused and not wrappers else found.item() > 0
        self._went(found if overflow is None else overflow, wrappers)
        self._tell(gates, optimizer, params, found, overflow)
        if fused:
            self._found = optimizer.found_inf = found  # type: ignore[attr-defined]
            return None
        return ((_stand_in(optimizer), *args[1:]), kwargs) if overflow else None

    def _before_closure(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._closure = guarded = guarded_closure(optimizer, closure, lambda each: self.look(each, self.gates(), params_of(each)))
        if guarded.idles:
            args = (_stand_in(optimizer), *args[1:])
        if "closure" in kwargs:
            return args, {**kwargs, "closure": guarded}
        return (args[0], guarded, *args[2:]), kwargs

    @torch.compiler.disable
    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Clean up after a step. If the step had a closure whose gradients overflowed, undo the step."""
        if self._found is None and self._closure is None:
            return
        frames = frames_of_step(optimizer)
        if not frames:
            return
        closure = self._closure
        self._clear(optimizer)
        if closure is None:
            return
        self._went(closure.overflow, wrappers_among(frames, optimizer))
        if closure.found is None:
            return
        if closure.overflow:
            closure.rewind()
        self._tell(self.gates(), optimizer, params_of(optimizer), closure.found, closure.overflow)

    def _went(self, skipped: bool | Tensor, wrappers: list[Any]) -> None:
        """Record whether the latest step was skipped, and report it to `wrappers`."""
        self._latest = skipped
        for wrapper in wrappers:
            tell(wrapper, self.skipped)
            self._told.add(wrapper)

    def _tell(
        self, gates: list[StepRecord], optimizer: Optimizer, params: list[Tensor], found: Tensor, overflow: bool | None
    ) -> None:
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
        """True if an optimizer whose kernel skips a step by `found_inf` has made its state already.

        An optimizer without state must not skip by itself, because a skipped first step would still make the state. torch's fused SGD
        would even leave the momentum uninitialised: torch/optim/sgd.py makes it with `empty_like`.
        """
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
    """A list of parameter groups that looks empty to loops and `len`. Code that looks up settings by index still finds the groups."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _stand_in(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class with no parameters and an empty state, which makes one step in place of `optimizer`."""
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
    idle.__dict__.pop("step", None)  # a scheduler may have put a `step` that is bound to the real optimizer here
    if type(optimizer).__module__.startswith("torch."):
        # Dynamo compiles the step only with a plain list. An empty list is safe, because no `step` of torch looks up a group by index,
        # except LBFGS's, and LBFGS never gets a stand-in.
        idle.param_groups = []
    else:
        idle.param_groups = _NoGroups({**group, "params": []} for group in optimizer.param_groups)
    idle.state = defaultdict(dict)
    idle._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
    return idle


_GUARDS: weakref.WeakKeyDictionary[Optimizer, Guard] = weakref.WeakKeyDictionary()


def _gate_died(guard: weakref.ref[Guard], ref: weakref.ref[StepRecord]) -> None:
    living = guard()
    if living is not None:
        living.drop(ref)
