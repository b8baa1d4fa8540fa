"""Skip the optimizer steps that overflowed, without wrapping the optimizer.

A gate belongs to a rewritten model.  It hangs on the step hooks that torch.optim offers; the optimizer object, its class
and its `step` stay what they were.  Before each step:

1. Look for inf and NaN in the gradients of all the optimizer's parameters, as torch.amp.GradScaler does
   (torch/amp/grad_scaler.py), with the same multi-tensor kernel; agree with the ranks that hold the other shards.
2. Tell the loss scale, which moves once per set of steps (loss_scale.py).
3. A fused optimizer gets the answer as its `found_inf` tensor and skips by itself: no host sync.
4. For any other optimizer read the answer.  To skip, step a stand-in: a hook may replace the arguments of
   `Optimizer.step`, `self` among them, so the class's own code runs once over no parameter groups and a throw-away state.
   Parameters, state, step counts and gradients of the real one stay as they are, and its scheduler sees a step.
5. With a closure, evaluate it first, check, and let the step find the loss ready.  LBFGS, which evaluates again and
   again, is put back to where it began if a later evaluation overflows.

Optimizers that nobody attached are found through the one hook that PyTorch keeps for all optimizers: when an optimizer
steps that owns a parameter of a live gate's model, the gate is attached to it.  To every other optimizer it does nothing;
without it an optimizer that was copied, unpickled or made by a trainer would step on infinities in silence.
`StepGate(adopt=False)` does without, and warns at the first backward that nothing guards.
"""

from __future__ import annotations

import copy
import sys
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from amprewrite.errors import AmpRewriteWarning, PolicyError
from amprewrite.loss_scale import DEFAULT_FLOOR, LossScale, LossScaleError

MAX_CONSECUTIVE_SKIPS = 50
"""More than the 46 halvings from the highest start of any preset, 2**32, down to the default floor, 2**-14."""

_FRAMES = 12
"""How far up the stack to look for who called `step`."""


@dataclass(frozen=True)
class Stuck:
    """What is known when step after step overflowed; `StepGate.diagnose` may make more of it."""

    skips: int
    scale: float
    floor: float
    dynamic: bool
    nonfinite: int
    """Of the `gradients` that the optimizer holds now."""
    gradients: int
    inputs_finite: bool | None = None
    outputs_finite: bool | None = None
    loss_finite: bool | None = None

    def diagnosis(self) -> str:
        """A scale search, an activation overflow in the forward, or NaN in the data or loss: which, why, what to do."""
        if self.inputs_finite is False:
            return "NaN in the data: the model's inputs are not finite; look at the batch"
        if self.outputs_finite is False:
            return (
                "an activation overflow in the forward: the inputs are finite and the outputs are not, and no loss scale "
                "changes that; keep the layer that overflows in fp32, or use bf16"
            )
        if self.loss_finite is False:
            return "NaN in the loss: the model's outputs are finite and the loss is not; look at the loss and its targets"
        if not self.dynamic:
            return "the static scale is too large for these gradients; use a smaller one or loss_scale='dynamic'"
        if self.scale > self.floor:
            return "a scale search that has not ended: the scale is still falling; start lower (init) or back off faster"
        return (
            "no scale search, for at this scale fp16 itself holds the gradients: an activation overflow in the forward or NaN "
            "in the data or the loss; see whether the outputs and the loss are finite"
        )


class StepGate:
    """Guards the optimizers of one model.  `parameters` gives the model's parameters as they are now (FSDP swaps them)."""

    def __init__(
        self,
        loss_scale: LossScale,
        parameters: Callable[[], Iterable[Tensor]],
        *,
        max_consecutive_skips: int | None = MAX_CONSECUTIVE_SKIPS,
        adopt: bool = True,
        diagnose: Callable[[Stuck], str | None] | None = None,
        on_overflow: Callable[[], str | None] | None = None,
    ) -> None:
        if max_consecutive_skips is not None and max_consecutive_skips < 1:
            raise PolicyError(f"max_consecutive_skips={max_consecutive_skips} must be at least 1; None never gives up")
        self.loss_scale = loss_scale
        self.parameters = parameters
        self.max_consecutive_skips = max_consecutive_skips
        self.adopt = adopt
        self.diagnose = diagnose
        """Asked first when training is stuck; what it returns, if anything, is the diagnosis."""
        self.on_overflow = on_overflow
        """Called after an overflow that the host knows of, so on every one but a fused optimizer's; names the culprit."""
        self._facts: dict[str, bool | Tensor] = {}
        self._warned = False
        self._forget_optimizers()

    def attach(self, optimizer: Optimizer) -> None:
        """Guard `optimizer`.  PolicyError if it is attached already or owns none of the model's parameters."""
        if not isinstance(optimizer, Optimizer):
            raise PolicyError(
                f"optimizer={type(optimizer).__name__} is no torch.optim.Optimizer, and only those can be guarded; "
                "attach the torch optimizer inside it"
            )
        if optimizer in self._attached:
            raise PolicyError(f"this {type(optimizer).__name__} is attached already; attach each optimizer once")
        if not self._owns(optimizer):
            raise PolicyError(
                f"this {type(optimizer).__name__} owns none of the model's parameters, so there is nothing to guard; "
                "build it from amp.parameters(), or leave it out"
            )
        self._guard(optimizer)
        self._attached.add(optimizer)

    def guards(self, optimizer: Optimizer) -> bool:
        """Whether overflowing steps of `optimizer` are skipped."""
        guard = _GUARDS.get(optimizer)
        return guard is not None and self in guard.gates()

    def snapshot(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """(scale, inverse) for one forward; from the first that a backward can follow, optimizers are looked for."""
        if self.adopt and not self._listening and torch.is_grad_enabled() and self.loss_scale.enabled:
            self._listening = True
            _listen(self)
        return self.loss_scale.snapshot(device)

    def watch(self, output: Tensor) -> None:
        """Warn, once, when a backward reaches `output` while no step is guarded (and none will be adopted)."""
        if self.adopt or self._warned or self._guarded or not output.requires_grad or not self.loss_scale.enabled:
            return
        output.register_hook(self._warn_unguarded)

    def note(self, **finite: bool | Tensor) -> None:
        """Whether the last `inputs`, `outputs` and `loss` were finite; tensors are read only if training gets stuck."""
        unknown = finite.keys() - {"inputs", "outputs", "loss"}
        if unknown:
            raise TypeError(f"note() takes inputs, outputs and loss, not {', '.join(sorted(unknown))}")
        self._facts |= finite

    def _owns(self, optimizer: Optimizer) -> bool:
        own = {id(p) for p in self.parameters()}
        return any(id(p) in own for p in _params(optimizer))

    def _guard(self, optimizer: Optimizer) -> None:
        own = {id(p) for p in self.parameters()}
        for p in _params(optimizer):
            if p.dtype == torch.float16 and id(p) in own:
                raise PolicyError(
                    f"a parameter of shape {tuple(p.shape)} is fp16, and an update in fp16 loses what is small; keep the model in "
                    "fp32 (model.float()): the rewrite runs it in fp16 and the fp32 parameters are the master weights"
                )
        guard = _GUARDS.get(optimizer)
        if guard is None:
            guard = _GUARDS[optimizer] = _Guard()
            optimizer.register_step_pre_hook(guard.before)
            optimizer.register_step_post_hook(guard.after)
        if self not in guard.gates():
            guard.refs.append(weakref.ref(self))
        self._guarded.add(optimizer)

    def _adopt(self, optimizer: Optimizer) -> None:
        """Guard an optimizer that is about to step, if it owns parameters of this model."""
        if optimizer in self._guarded or not self.loss_scale.enabled:
            return
        first = next(iter(self.parameters()), None)
        heads = tuple((len(group["params"]), id(group["params"][0]) if group["params"] else 0) for group in optimizer.param_groups)
        signature = (id(first), heads)
        if self._foreign.get(optimizer) == signature:
            return
        if self._owns(optimizer):
            self._guard(optimizer)
        else:
            self._foreign[optimizer] = signature

    def _warn_unguarded(self, gradient: Tensor) -> None:
        if self._warned or self._guarded:
            return
        self._warned = True
        warnings.warn(
            "this backward is loss-scaled, but no optimizer is attached, so nothing will skip a step that overflowed; "
            "call amp.attach(optimizer), or give rewrite(..., optimizer=optimizer)",
            AmpRewriteWarning,
            stacklevel=2,
        )

    def _stepped(self, optimizer: Optimizer, overflow: bool | None) -> None:
        """Raise if training is stuck.  `overflow` is None where only the device knows: then look every so often."""
        if overflow is False or self.max_consecutive_skips is None:
            self._until_look = self.max_consecutive_skips or 0
            return
        if overflow and self.on_overflow is not None:
            self.loss_scale.culprit = self.on_overflow() or self.loss_scale.culprit
        self._until_look -= 1
        if self._until_look > 0 and not (overflow and self.loss_scale.stuck()):
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        skips = self.loss_scale.consecutive_skips()
        self._until_look = max(self.max_consecutive_skips - skips, 1)
        if skips >= self.max_consecutive_skips or self.loss_scale.stuck():
            self._until_look = self.max_consecutive_skips
            raise self._stuck(optimizer, skips)

    def _stuck(self, optimizer: Optimizer, skips: int) -> LossScaleError:
        floor = getattr(self.loss_scale, "floor", None) or DEFAULT_FLOOR
        gradients = [p.grad for p in _params(optimizer) if p.grad is not None]
        finite = {f"{name}_finite": bool(value) for name, value in self._facts.items()}
        stuck = Stuck(
            skips,
            self.loss_scale.value,
            floor,
            self.loss_scale.kind == "dynamic",
            sum(not bool(_local(g).isfinite().all()) for g in gradients),
            len(gradients),
            **finite,
        )
        diagnosis = (self.diagnose(stuck) if self.diagnose is not None else None) or stuck.diagnosis()
        culprit = f"; the last overflow began at {self.loss_scale.culprit}" if self.loss_scale.culprit else ""
        return LossScaleError(
            f"{skips} optimizer steps in a row were skipped for non-finite gradients ({stuck.nonfinite} of {stuck.gradients} now), "
            f"with the loss scale at {stuck.scale:g} (floor {floor:g}). This is {diagnosis}{culprit}"
        )

    def _forget_optimizers(self) -> None:
        self._attached: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._guarded: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._foreign: weakref.WeakKeyDictionary[Optimizer, tuple[Any, ...]] = weakref.WeakKeyDictionary()
        self._listening = False
        self._until_look = self.max_consecutive_skips or 0

    def __getstate__(self) -> dict[str, Any]:
        """Without the optimizers: a copy belongs to a copied model, whose optimizers it will find."""
        mine = ("_attached", "_guarded", "_foreign", "_listening", "_until_look")
        return {name: value for name, value in self.__dict__.items() if name not in mine} | {"_facts": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_optimizers()


_GUARDS: weakref.WeakKeyDictionary[Optimizer, _Guard] = weakref.WeakKeyDictionary()
_LISTENERS: weakref.WeakSet[StepGate] = weakref.WeakSet()
_HOOK: list[Any] = []


def _listen(gate: StepGate) -> None:
    _LISTENERS.add(gate)
    if not _HOOK:
        _HOOK.append(register_optimizer_step_pre_hook(_before_any_step))


def _before_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook added here to the optimizer itself still runs before this very step."""
    for gate in tuple(_LISTENERS):
        gate._adopt(optimizer)


class _Guard:
    """The hooks on one optimizer; several gates share them, so that gradients are checked once and all gates agree."""

    def __init__(self) -> None:
        self.refs: list[weakref.ref[StepGate]] = []
        self._found: Tensor | None = None
        self._closure: _Closure | None = None
        self._warm: tuple[int, int, int] | None = None

    def gates(self) -> list[StepGate]:
        return [gate for ref in self.refs if (gate := ref()) is not None and gate.loss_scale.enabled]

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gates = self.gates()
        caller = sys._getframe(1)
        if not gates or _is_inner_step(caller, optimizer):
            return None
        self._clear(optimizer)
        _refuse_grad_scaler(optimizer, caller, kwargs)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if callable(closure):
            return self._before_closure(optimizer, args, kwargs, closure)
        found = find_nonfinite(optimizer)
        if found is None:
            return None
        fused = self._skips_by_itself(optimizer)
        overflow = None if fused else found.item() > 0
        self._tell(gates, optimizer, found, overflow)
        if fused:
            self._found = optimizer.found_inf = found  # type: ignore[attr-defined]
            return None
        return ((_stand_in(optimizer), *args[1:]), kwargs) if overflow else None

    def _before_closure(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with torch.enable_grad():
            loss = closure()
        self._closure = evaluated = _Closure(optimizer, closure, loss)
        if evaluated.overflow and evaluated.start is None:
            args = (_stand_in(optimizer), *args[1:])
        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_inner_step(sys._getframe(1), optimizer):
            return
        closure = self._closure
        self._clear(optimizer)
        if closure is None or closure.found is None:
            return
        if closure.overflow:
            closure.rewind()
        self._tell(self.gates(), optimizer, closure.found, closure.overflow)

    def _tell(self, gates: list[StepGate], optimizer: Optimizer, found: Tensor, overflow: bool | None) -> None:
        for scale in {id(gate.loss_scale): gate.loss_scale for gate in gates}.values():
            scale.observe(found, source=id(optimizer))
        for gate in gates:
            gate._stepped(optimizer, overflow)

    def _skips_by_itself(self, optimizer: Optimizer) -> bool:
        """Whether its kernel heeds `found_inf`, and has its state: a first step that is skipped must not make one.

        (torch's fused SGD even leaves momentum uninitialised then: torch/optim/sgd.py makes it with `empty_like`.)
        """
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        active = [
            p
            for group in optimizer.param_groups
            if group.get("momentum") != 0
            for p in group["params"]
            if p.grad is not None
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


class _Closure:
    """A closure whose first evaluation is known, and whose later ones are checked.

    A later evaluation that overflows has no gradient to give: from then on there is none, and the loss is the first one, which
    ends any line search.  LBFGS is put back to its start afterwards, so its step is skipped like any other.
    """

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Any], loss: Any) -> None:
        self.optimizer, self.closure, self.loss = optimizer, closure, loss
        self.found = find_nonfinite(optimizer)
        self.overflow = self.found is not None and self.found.item() > 0
        self.start: list[tuple[Tensor, Tensor, dict[str, Any] | None]] | None = None
        self._calls = 0
        if isinstance(optimizer, torch.optim.LBFGS):
            self.start = [
                (p, p.detach().clone(), copy.deepcopy(optimizer.state[p]) if p in optimizer.state else None)
                for p in _params(optimizer)
            ]
            if self.overflow:
                self._drop_gradients()

    def __call__(self) -> Any:
        self._calls += 1
        if self._calls == 1 or self.overflow:
            return self.loss
        with torch.enable_grad():
            loss = self.closure()
        found = find_nonfinite(self.optimizer)
        if found is None or found.item() == 0:
            return loss
        self.found, self.overflow = found, True
        self._drop_gradients()
        return self.loss

    def _drop_gradients(self) -> None:
        for p in _params(self.optimizer):
            p.grad = None

    @torch.no_grad()
    def rewind(self) -> None:
        for p, value, state in self.start or ():
            p.copy_(value)
            self.optimizer.state.pop(p, None)
            if state is not None:
                self.optimizer.state[p] = state


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
    idle.param_groups = _NoGroups({**group, "params": []} for group in optimizer.param_groups)
    idle.state = defaultdict(dict)
    idle._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
    return idle


def find_nonfinite(optimizer: Optimizer) -> Tensor | None:
    """0-dim fp32, above 0 if any gradient holds inf or NaN on any rank that shares it; None if there is no gradient.

    Each shard is checked where it lies.  Who takes part in the agreement follows from the parameters and not from the
    gradients, so every rank makes the same collective calls.  Dense gradients that DDP averaged agree by themselves.
    """
    buckets: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    groups: dict[int, tuple[Any, torch.device | None]] = {}
    device = None
    for p in _params(optimizer):
        device = device or p.device
        _collect_groups(p, groups)
        grad = p.grad
        if grad is None:
            continue
        if grad.dtype == torch.float16:
            raise PolicyError(
                f"the gradient of a parameter of shape {tuple(p.shape)} is fp16, where a skipped step cannot be told from a lost one; "
                "keep the parameters in fp32 (model.float())"
            )
        grad = _local(grad)
        buckets[grad.device, grad.dtype].append(grad)
    if device is None or not (buckets or groups):
        return None
    one_by_device: dict[torch.device, tuple[Tensor, Tensor]] = {}
    with torch.inference_mode(False), torch.no_grad():
        for (where, _), grads in buckets.items():
            if where not in one_by_device:
                one_by_device[where] = torch.zeros((), device=where), torch.ones((), device=where)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, *one_by_device[where])
        flags = [flag for flag, _ in one_by_device.values()] or [torch.zeros((), device=device)]
        found = flags[0]
        for flag in flags[1:]:
            found = found + flag.to(found.device, non_blocking=True)
        for group, on in groups.values():
            shared = found if on is None else found.to(on)
            torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX, group=group)
            found = shared.to(found.device)
    return found


def _collect_groups(p: Tensor, groups: dict[int, tuple[Any, torch.device | None]]) -> None:
    """Add the process groups over which `p` is sharded: a DTensor's (FSDP2, tensor parallel), or the world for FSDP1."""
    if type(p) is torch.nn.Parameter:
        if getattr(p, "_fsdp_flattened", False) and torch.distributed.is_initialized():
            groups.setdefault(0, (None, None))
        return
    mesh = getattr(p, "device_mesh", None)
    for dim, placement in enumerate(getattr(p, "placements", ())):
        if mesh is not None and not placement.is_replicate():
            group = mesh.get_group(dim)
            groups.setdefault(id(group), (group, torch.device(mesh.device_type)))


def _local(grad: Tensor) -> Tensor:
    """The dense, real tensor with the values of this rank."""
    if hasattr(grad, "to_local"):
        grad = grad.detach().to_local()
    if grad.is_sparse:
        grad = grad.coalesce()._values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


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


def _refuse_grad_scaler(optimizer: Optimizer, caller: FrameType, kwargs: dict[str, Any]) -> None:
    """LossScaleError if a GradScaler steps this optimizer.

    It leaves `found_inf` on optimizers that skip by themselves; for the others it is only visible as a caller.
    """
    scaler = hasattr(optimizer, "found_inf") or "grad_scaler" in kwargs
    frame: FrameType | None = caller
    for _ in range(_FRAMES):
        if scaler or frame is None:
            break
        scaler = frame.f_code is GradScaler.step.__code__ and frame.f_locals["self"].is_enabled()
        frame = frame.f_back
    if scaler:
        raise LossScaleError(
            "a torch.amp.GradScaler steps this optimizer, but the rewritten model scales its own gradients, so the loss is scaled "
            "twice; remove scaler.scale, unscale_, step and update and call loss.backward() and optimizer.step(), or rewrite with "
            "loss_scale='none' to keep the scaler"
        )
