"""Loss scales: the numbers by which gradients inside a rewritten graph are multiplied, and the schedules that change them.

A scale is updated once per set of optimizer steps, by the rules of torch.amp.GradScaler (Micikevicius et al. 2017, arXiv 1710.03740):

1. If a gradient overflowed, the scale is multiplied by `backoff_factor`, and the growth tracker becomes 0. With `hysteresis` the first
   few overflows leave the scale alone.
2. If all gradients are finite, the growth tracker increases by 1. When it reaches `growth_interval`, the scale is multiplied by
   `growth_factor`, and the tracker becomes 0.
3. The scale is kept within [floor, cap].

The state consists of tensors, and `update` causes no host sync. Reading `value`, `report()` or `state_dict()` causes a host sync.
The tensors that `snapshot` returns never change, because graphs save them for their backward.

A set of steps holds one step of each optimizer that steps between two forward passes. Their overflows count as one, as under one
`GradScaler.update()`. The set ends at the next `snapshot` (a forward), or when one of its optimizers steps again.

Once a CUDA graph has recorded a step, the state is updated on the device, in place (on_device.py), and `snapshot` returns copies.

One file because the schedules differ in a few lines each and are best compared side by side.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from amprewrite.graphs.fx.ops.on_device import EMPTY, Recorded, on_device, recording
from amprewrite.runtime.training.loss_scale_state import (
    COUNTERS,
    OWN_KEY,
    PRESETS,
    LossScaleReport,
    check_state,
    host_numbers,
    positive,
    reciprocal,
)
from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.errors import AmpRewriteError, PolicyError
from amprewrite.tables.formats import NARROWEST, Format, parse_format

DEFAULT_FLOOR = NARROWEST.smallest_normal
"""2**-14, the smallest normal number of fp16. Under a smaller scale even a gradient of 1 is subnormal, so shrinking further cannot help."""

DEFAULT_CAP = 2.0**32
"""Default upper bound of a dynamic scale: the largest initial scale that another library uses (Megatron, DeepSpeed)."""

_STEPS, _SKIPPED, _CONSECUTIVE, _SINCE = range(4)
_AFTER_GOOD = ([1, 1, 0, 1], [1, 0, 0, 1])
_AFTER_OVERFLOW = ([1, 1, 1, 0], [1, 1, 1, 0])
"""Changes of the counters (_STEPS, ...) by a step without or with overflow: (factors, addends). Each becomes factor * counter + addend."""
_UNTRIED, _FALLING, _RISING = 3, 2, 1
"""Stages of the search that `search_interval` asks for: no step yet; only overflows so far; the scale grows again. 0: no search."""
_OWN_SETTINGS = ("floor", "cap", "hysteresis", "refill", "rest", "raise_at_floor", "search_interval")


class LossScaleError(AmpRewriteError):
    """Raised if too many steps overflow, a GradScaler scales the same loss, or a CUDA graph is recorded before the model has trained."""


class LossScale:
    """Base class of loss scales: holds the scale, counters of steps, and overflow flags of steps that have not updated the scale yet."""

    kind: ClassVar[str] = "static"
    enabled: ClassVar[bool] = True
    _state: ClassVar[tuple[str, ...]] = ("_scale", "_counters")

    def __init__(self, init: float) -> None:
        self._scale = _scalar(init, torch.float32)
        self._counters = torch.zeros(COUNTERS, dtype=torch.int64, device="cpu")
        self._tables: tuple[Tensor, ...] = ()
        self._pending: Tensor | None = None
        self._sources: set[Hashable] = set()
        self._replicas: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._nothing = _scalar(EMPTY, torch.float32)
        self._recorded: Recorded | None = None
        self.overflow_at: str | None = None
        self.withheld = False
        """True while training forwards use 1 instead of the scale, because no optimizer of the model is known."""
        self.ask: Callable[[], None] | None = None
        """Function that sets `overflow_at` to the place where the latest step overflowed; None if the host knows already whether it did."""

    def snapshot(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Return (scale, 1/scale) for one forward: 0-dim fp32 tensors on `device`, which later updates do not change.

        Before that, the scale is updated by the optimizer steps since the last forward. Raises LossScaleError if a CUDA graph is being
        recorded before the model has trained on `device`: then the state of the scale is not on `device` yet.
        """
        device = torch.device(device)
        if self._recorded is None and recording(device):
            self._keep_addresses(device)
        self.apply_pending()
        pair = self._replicas.get(device)
        if pair is None:
            with torch.inference_mode(False), torch.no_grad():
                if self._scale.device.type == "cpu" and device.type not in ("cpu", "meta"):
                    self._to(device)
                scale = self._scale if self._recorded is None else self._scale.clone()
                pair = on_device(scale, device), on_device(reciprocal(scale), device)
            if self._recorded is None:
                self._replicas[device] = pair
        return pair

    def _keep_addresses(self, device: torch.device) -> None:
        """Keep the tensors of the state at fixed addresses from now on. Call this when a CUDA graph first records this scale.

        Raises LossScaleError if the model has not trained on `device` yet.
        """
        if self._scale.device.type != device.type or not self._tables:
            raise LossScaleError(
                "a CUDA graph is being recorded before this model has trained on its device; take three steps or more on a side "
                "stream first, as PyTorch's notes on CUDA graphs show"
            )
        self._recorded = Recorded(self, self._state, self._nothing if self._pending is None else self._pending)
        self._pending, self._replicas = None, {}

    def observe(self, found_inf: Tensor, source: Hashable = None) -> None:
        """Record that the optimizer `source` stepped. `found_inf` is a 0-dim fp32 tensor, above 0 if a gradient overflowed.

        The scale is updated later, once for all optimizers: at the next `snapshot`, when the scale is read, or when `source` steps again.
        """
        if self._recorded is None and recording(found_inf.device):
            self._keep_addresses(found_inf.device)
        if source in self._sources:
            self.apply_pending()
        self._sources.add(source)
        if self._recorded is not None:
            self._recorded.post(found_inf)
            return
        if self._pending is None:
            self._pending = found_inf
            return
        with torch.inference_mode(False), torch.no_grad():
            self._pending = self._pending + on_device(found_inf, self._pending.device)

    def apply_pending(self) -> None:
        """Update the scale by the optimizer steps that `observe` recorded since the last update. Do nothing if there are none."""
        if self._recorded is not None:
            self._sources.clear()
            with torch.inference_mode(False), torch.no_grad():
                self._recorded.apply_pending(self.update)
            return
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self._sources.clear()
        self.update(pending)

    def update(self, found_inf: Tensor) -> None:
        """Update the scale and the counters, once for the latest steps of all optimizers, without a host sync.

        `found_inf` is a 0-dim fp32 tensor, above 0 if one of the steps overflowed.
        """
        with torch.inference_mode(False), torch.no_grad():
            if self._scale.device != found_inf.device:
                if self._scale.device.type == "cpu":
                    self._to(found_inf.device)
                found_inf = on_device(found_inf, self._scale.device)
            overflow = found_inf > 0
            self._move(found_inf, overflow)
            if not self._tables:
                rows = (*_AFTER_GOOD, *_AFTER_OVERFLOW)
                self._tables = tuple(torch.tensor(row, dtype=torch.int64, device=overflow.device) for row in rows)
            good_times, good_plus, bad_times, bad_plus = self._tables
            good = torch.addcmul(good_plus, self._counters, good_times)
            bad = torch.addcmul(bad_plus, self._counters, bad_times)
            self._counters = torch.where(overflow, bad, good)

    def _move(self, found_inf: Tensor, overflow: Tensor) -> None:
        """Set the new scale as a new tensor, because graphs may have saved the old one. Drop the copies of the scale on other devices.

        The base class does nothing: its scale is constant.
        """

    @property
    def value(self) -> float:
        """The scale; 1 while training forwards use 1 in its place, because no optimizer of the model is known. Causes a host sync."""
        return 1.0 if self.withheld else self.number

    @property
    def number(self) -> float:
        """The scale, updated by all optimizer steps so far. Unlike `value`, it is not 1 while no optimizer is known. Causes a host sync."""
        self.apply_pending()
        return self._scale.item()

    @property
    def at_floor(self) -> bool:
        """True if the scale has reached its lower bound. False for a static scale. A dynamic scale with a floor causes a host sync."""
        return False

    def consecutive_skips(self) -> int:
        """Return how many steps in a row, up to the latest step, were skipped. Causes a host sync.

        Steps of several optimizers between two forward passes count as one step, skipped if any of them overflowed.
        """
        known, found = int(self._counters[_CONSECUTIVE]), self._waiting()
        if found == EMPTY:
            return known
        return known + 1 if found > 0 else 0

    def _waiting(self) -> float:
        """Read, by a host sync, the flag of steps that have not updated the scale yet: above 0 for overflow, 0 without; -1 if no step."""
        waiting = self._pending if self._recorded is None else self._recorded.mailbox
        return EMPTY if waiting is None else waiting.item()

    def stuck(self) -> bool:
        """True if training must stop now, because a dynamic scale cannot shrink below its `floor`. False for a static scale."""
        return False

    def report(self) -> LossScaleReport:
        """Return the scale, the counts of steps and skipped steps, and where the last overflow began. Causes a host sync."""
        self.apply_pending()
        steps, skipped, consecutive, since = self._counters.tolist()
        if consecutive and self.ask is not None:
            self.ask()
        last = steps - since if skipped else None
        withheld = self.number if self.withheld else None
        return LossScaleReport(self.kind, self.value, steps, skipped, consecutive, last, self.at_floor, self.overflow_at, withheld)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with GradScaler's five keys, and the rest under a key that GradScaler ignores. Causes a host sync."""
        self.apply_pending()
        return {
            "scale": self.number,
            "growth_factor": 1.0,
            "backoff_factor": 1.0,
            "growth_interval": 1,
            "_growth_tracker": 0,
            OWN_KEY: {"kind": self.kind, "counters": self._counters.tolist()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the `state_dict()` of a static scale. Raises PolicyError for the state of a dynamic scale or an invalid state."""
        check_state(state)
        if state["growth_factor"] != 1.0 or state["backoff_factor"] != 1.0:
            raise PolicyError(
                "this state dict belongs to a dynamic loss scale, and the loss scale here is static; "
                'rewrite with loss_scale="dynamic" to resume it'
            )
        self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        device = self._scale.device
        self._pending = None
        self._sources.clear()
        self._replicas = {}
        if self._recorded is not None:
            self._recorded.mailbox.fill_(EMPTY)
        with self._recorded.in_place() if self._recorded is not None else contextlib.nullcontext():
            self._load_tensors(state, device)

    def _load_tensors(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._scale = _scalar(float(state["scale"]), torch.float32, device)
        counters = state.get(OWN_KEY, {}).get("counters", [0] * COUNTERS)
        self._counters = torch.tensor(counters, dtype=torch.int64, device=device)

    def _to(self, device: torch.device) -> None:
        """Move the state from the CPU, where it is made, to the device of the model."""
        for name in (*self._state, "_nothing"):
            setattr(self, name, getattr(self, name).to(device))
        self._tables = ()
        self._replicas = {}

    def __getstate__(self) -> dict[str, Any]:
        self.apply_pending()
        state = {**self.__dict__, "_replicas": {}, "_tables": (), "_recorded": None, "ask": None, "withheld": False}
        del state["_nothing"]  # __setstate__ makes a new tensor, because this one may be freed before a spawned process opens its memory
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._nothing = _scalar(EMPTY, torch.float32)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.number:g})"


class NoLossScale(LossScale):
    """No loss scaling: the scale is 1, and gradients are not checked for overflow. For bf16 and fp32."""

    kind = "none"
    enabled = False

    def __init__(self) -> None:
        super().__init__(1.0)

    def observe(self, found_inf: Tensor, source: Hashable = None) -> None:
        """Do nothing: there is no scale to update."""

    def update(self, found_inf: Tensor) -> None:
        """Do nothing: there is no scale to update."""

    def state_dict(self) -> dict[str, Any]:
        """Return {}, as a disabled GradScaler does."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load nothing, so that fp16 runs can resume in bf16. Raises PolicyError if `state` is neither empty nor of a loss scale."""
        if not isinstance(state, Mapping) or len(state):
            check_state(state)

    def __repr__(self) -> str:
        return "NoLossScale()"


class StaticLossScale(LossScale):
    """A constant scale. Steps whose gradients overflow are skipped. Raises PolicyError unless `value` is positive and in fp32's range."""

    def __init__(self, value: float) -> None:
        super().__init__(positive("StaticLossScale", "value", value))


class DynamicLossScale(LossScale):
    """A scale that shrinks when gradients overflow, and grows after `growth_interval` clean steps, that is, steps without overflow.

    `init`: the scale at the start. `growth_factor`, `backoff_factor`: the scale is multiplied by these when it grows or shrinks.
    `floor`, `cap`: bounds of the scale. None means no bound: without a floor the scale may shrink for ever; without a cap it stays within
    fp32's range. With `cap=math.inf` it may become infinite.
    `hysteresis`: only overflows after the first `hysteresis - 1` shrink the scale. The count of overflows starts again when the scale
    grows, or, if `refill="good"`, after every clean step.
    `rest`: number of clean steps, at the start and after an overflow, that do not count towards growth.
    `raise_at_floor`: if true, an overflow that cannot shrink the scale because of `floor` ends training with a LossScaleError.
    `search_interval`: if set, the right scale is found faster at the start. Overflows before the first clean step apply `backoff_factor`
    four times: with the default they divide the scale by 16, not by 2. Then the scale grows after every `search_interval` clean steps
    until the next overflow. The search skips only a step or two. If the very first step is clean, `search_interval` changes nothing.

    Raises PolicyError for invalid settings, and for `per_layer=True`: scales per layer (adaptive loss scaling, Zhao et al. 2019, arXiv
    1910.12385) are not offered. A factor between two layers is right only if every gradient passes it, and residual connections bypass it.
    """

    kind = "dynamic"
    _state = (*LossScale._state, "_growth_tracker", "_left", "_searching")

    def __init__(
        self,
        init: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        floor: float | None = DEFAULT_FLOOR,
        cap: float | None = DEFAULT_CAP,
        hysteresis: int = 1,
        *,
        refill: str = "growth",
        rest: int = 0,
        raise_at_floor: bool = False,
        search_interval: int | None = None,
        per_layer: bool = False,
    ) -> None:
        if per_layer:
            raise PolicyError(
                "DynamicLossScale: per_layer=True is not offered: with residual connections no scale of one layer is sound by "
                "itself; leave it out, and keep a layer that underflows in fp32 with overrides={'module:path': 'fp32'}"
            )
        super().__init__(positive("DynamicLossScale", "init", init))
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = growth_interval
        self.floor = floor if floor is None else float(floor)
        self.cap = cap if cap is None else float(cap)
        self.hysteresis = hysteresis
        self.refill = refill
        self.rest = rest
        self.raise_at_floor = raise_at_floor
        self.search_interval = search_interval
        self._check()
        if not (self.floor or 0.0) <= init <= (math.inf if self.cap is None else self.cap):
            raise PolicyError(f"DynamicLossScale: init={init:g} lies outside floor={self.floor} and cap={self.cap}; start between them")
        self._growth_tracker = _scalar(-rest, torch.int32)
        self._left = _scalar(hysteresis, torch.int32)
        self._searching = _scalar(0 if search_interval is None else _UNTRIED, torch.int32)

    @classmethod
    def preset(cls, name: str) -> DynamicLossScale:
        """Return a scale with the schedule of another library: "torch", "tf", "keras", "keras3", "apex", "deepspeed" or "megatron".

        "auto" is the default schedule of fp16 models. Raises PolicyError for any other name.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise PolicyError(f"there is no loss-scale preset {shown(name)}; use one of {', '.join(PRESETS)}")
        return cls(**PRESETS[name])

    def _check(self) -> None:
        """Raise PolicyError if a setting has the wrong type or lies outside its range."""
        where = "DynamicLossScale"
        if not 1.0 < self.growth_factor < math.inf:
            raise PolicyError(f"{where}: growth_factor={self.growth_factor:g} would not grow the scale; use one above 1, say 2")
        if not 0.0 < self.backoff_factor < 1.0:
            raise PolicyError(f"{where}: backoff_factor={self.backoff_factor:g} must lie between 0 and 1, say 0.5")
        for name, least in (("growth_interval", 1), ("hysteresis", 1), ("rest", 0)):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise PolicyError(f"{where}: {name}={shown(number)} counts steps; give a whole number, at least {least}")
        if (often := self.search_interval) is not None and (isinstance(often, bool) or not isinstance(often, int) or often < 1):
            raise PolicyError(f"{where}: search_interval={shown(often)} counts steps; give a whole number above 0, or None")
        if self.refill not in ("growth", "good"):
            raise PolicyError(f"{where}: refill={shown(self.refill)} must be 'growth' or 'good', as after every good step")
        if self.floor is not None:
            positive(where, "floor", self.floor)
        if self.cap is not None and not self.cap > 0:
            raise PolicyError(f"{where}: cap={self.cap:g} must be above 0; leave it out for the default, 2**32")
        if self.floor is not None and self.cap is not None and self.floor > self.cap:
            raise PolicyError(f"{where}: floor={self.floor:g} is above cap={self.cap:g}; swap them")
        if self.raise_at_floor and self.floor is None:
            raise PolicyError(f"{where}: raise_at_floor needs a floor; give floor=1.0")

    def update(self, found_inf: Tensor) -> None:
        """Update the scale and the counters, once for the latest steps of all optimizers. `found_inf` is above 0 if a step overflowed.

        If only counters change, and all of them are on the CPU, this takes two ops.
        """
        by = self._only_counts(found_inf)
        if not by:
            super().update(found_inf)
            return
        self._growth_tracker = self._growth_tracker + by
        self._counters = torch.addcmul(self._tables[1], self._counters, self._tables[0])

    def _only_counts(self, found_inf: Tensor) -> int:
        """Return the number that `update(found_inf)` adds to the growth tracker, which counts clean steps until the scale grows.

        Returns 0 if the update may change more than counters, or if finding out would need a host sync.
        """
        numbers = host_numbers(found_inf, self._scale, self._growth_tracker, self._left, self._searching)
        if not numbers or not self._tables or self._recorded is not None or torch.is_inference_mode_enabled():
            return 0
        found, scale, tracker, left, searching = numbers
        by = max(self.growth_interval // (self.search_interval or 1), 1) if searching == _RISING else 1
        inside = (self.floor or 0.0) <= scale <= (math.inf if self.cap is None else self.cap)
        clean = found == 0 and searching in (0, _RISING) and tracker + by < self.growth_interval
        return by if clean and inside and left >= 1 and self.refill != "good" else 0

    def _move(self, found_inf: Tensor, overflow: Tensor) -> None:
        scale = self._scale.clone()
        if self.hysteresis == 1 and self.rest == 0 and self.cap != math.inf and self.search_interval is None:
            torch._amp_update_scale_(scale, self._growth_tracker, found_inf, self.growth_factor, self.backoff_factor, self.growth_interval)
        else:
            scale = self._moved_by_where(scale, overflow)
        if self.floor is not None or self.cap is not None:
            scale.clamp_(self.floor, self.cap)
        self._scale = scale
        self._replicas = {}

    def _moved_by_where(self, scale: Tensor, overflow: Tensor) -> Tensor:
        """Return the new scale by the rules of `torch._amp_update_scale_` and the settings that torch lacks.

        These settings are `hysteresis`, `rest`, `search_interval` and an infinite `cap`.
        """
        back_off = overflow & (self._left <= 1)
        tracker, backed_off = self._growth_tracker + 1, scale * self.backoff_factor
        if self.search_interval is not None:
            falling, rising = self._searching >= _FALLING, self._searching == _RISING
            tracker = tracker + rising * (max(self.growth_interval // self.search_interval, 1) - 1)
            backed_off = torch.where(falling, scale * self.backoff_factor**4, backed_off)
            after_overflow = torch.where(falling, _FALLING, 0)
            after_clean = torch.where((self._searching == _FALLING) | rising, _RISING, 0)
            self._searching = torch.where(overflow, after_overflow, after_clean).to(torch.int32)
        grow = ~overflow & (tracker >= self.growth_interval)
        grown = scale * self.growth_factor
        if self.cap != math.inf:
            grown = torch.where(grown.isfinite(), grown, scale)
        self._growth_tracker = torch.where(overflow, -self.rest, tracker.masked_fill(grow, 0)).to(torch.int32)
        refilled = ~overflow if self.refill == "good" else grow
        self._left = torch.where(refilled, self.hysteresis, (self._left - overflow.int()).clamp_(min=1)).to(torch.int32)
        return torch.where(back_off, backed_off, torch.where(grow, grown, scale))

    @property
    def at_floor(self) -> bool:
        """True if the scale has reached `floor`. If there is a floor, reading this property causes a host sync."""
        return self.floor is not None and self.number <= self.floor

    def stuck(self) -> bool:
        """True if `raise_at_floor` is set, the latest optimizer steps overflowed, and only `floor` keeps the scale from shrinking.

        Causes a host sync if `raise_at_floor` is set.
        """
        if not self.raise_at_floor or self._waiting() <= 0 or self._scale.item() > (self.floor or 0.0):
            return False
        return self._left.item() <= 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state with GradScaler's five keys, and the rest under a key that GradScaler ignores. Causes a host sync."""
        state = super().state_dict()
        state[OWN_KEY] |= {name: getattr(self, name) for name in _OWN_SETTINGS} | {
            "left": int(self._left),
            "searching": int(self._searching),
        }
        return state | {
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self._growth_tracker),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the `state_dict()` of a DynamicLossScale or a GradScaler. The settings in the state replace the settings here.

        Raises PolicyError for an invalid state.
        """
        check_state(state)
        own = state.get(OWN_KEY, {})
        settings = {name: own[name] for name in _OWN_SETTINGS if name in own} | {"growth_interval": state["growth_interval"]}
        settings |= {name: float(state[name]) for name in ("growth_factor", "backoff_factor")}
        new = object.__new__(type(self))  # check the settings on a copy first, so that an invalid state does not change this object
        new.__dict__.update(self.__dict__ | settings)
        try:
            new._check()
        except (PolicyError, TypeError, ValueError) as error:
            raise PolicyError(f"this loss-scale state cannot be loaded: {error}") from error
        self.__dict__.update(settings)
        self._load(state)

    def _load_tensors(self, state: Mapping[str, Any], device: torch.device) -> None:
        super()._load_tensors(state, device)
        own = state.get(OWN_KEY, {})
        self._growth_tracker = _scalar(int(state["_growth_tracker"]), torch.int32, device)
        self._left = _scalar(own.get("left", self.hysteresis), torch.int32, device)
        self._searching = _scalar(own.get("searching", 0), torch.int32, device)

    def __repr__(self) -> str:
        return (
            f"DynamicLossScale({self.number:g}, growth_factor={self.growth_factor:g}, backoff_factor={self.backoff_factor:g}, "
            f"growth_interval={self.growth_interval}, floor={self.floor}, cap={self.cap}, hysteresis={self.hysteresis})"
        )


def parse_loss_scale(spec: object, fmt: str | torch.dtype | Format) -> LossScale:
    """Return the loss scale that `spec` means for the low format `fmt`.

    `spec` is "auto" (dynamic for fp16, none for formats with fp32's range), "none", "dynamic", the name of a preset, or a number for a
    constant scale. A LossScale is returned itself. Raises PolicyError for anything else.
    """
    if isinstance(spec, LossScale):
        return spec
    if isinstance(spec, int | float) and not isinstance(spec, bool):
        return StaticLossScale(spec)
    if isinstance(spec, str):
        if spec == "auto":
            return DynamicLossScale.preset("auto") if parse_format(fmt).narrow else NoLossScale()
        if spec == "none":
            return NoLossScale()
        if spec == "dynamic":
            return DynamicLossScale()
        if spec in PRESETS:
            return DynamicLossScale.preset(spec)
    raise PolicyError(
        f"loss_scale={shown(spec)} means nothing; use 'auto', 'none', 'dynamic', one of {', '.join(PRESETS)}, a number, "
        "or a loss-scale object such as DynamicLossScale(init=2**14)"
    )


def _scalar(value: float, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return `value` as a 0-dim tensor with a version counter, which a tensor made in inference mode lacks."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device=device)
