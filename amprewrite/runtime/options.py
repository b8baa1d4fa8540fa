"""The checked options of one `rewrite` call, and the policy that they give on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from amprewrite.ir.evidence.ranges import Calibration, KeepHigh
from amprewrite.ir.plans.plan import ModelPlan
from amprewrite.ir.policies.policy import Override, PadPolicy, Policy, ProductPolicy
from amprewrite.runtime.parts import MODEL, Granularity
from amprewrite.tables.devices import Device, best_format
from amprewrite.tables.formats import FP32, Format
from amprewrite.tables.ops.op_lists import OpLists
from amprewrite.tables.recipes import BASE


@dataclass(frozen=True)
class Options:
    """The options of one `rewrite` call, checked."""

    low: Format | None
    """The low format. None: the best format for the device, or fp32 if no low format gains speed on it."""
    lists: str | OpLists = "default"
    overrides: tuple[Override, ...] = ()
    backend: str | Callable[..., Any] = "eager"
    cache_weights: bool | str = True
    """True: a graph casts each weight where it reads the weight; calls without gradients inside `frozen_weights()` share low copies.
    "step": like True, and all eager graphs keep copies until an optimizer steps. False: no copy is kept."""
    strict: bool = False
    given: ModelPlan | None = None
    """An earlier plan that the rewrite follows; None: the rewrite makes a plan."""
    granularity: Granularity = MODEL
    """How the model is split into parts that are captured separately: "model" (no parts), "blocks", or patterns of module paths."""
    calibration: Calibration | None = None
    keep_high: KeepHigh | None = None
    loss_scale: Any = "auto"
    """An argument of `parse_loss_scale`: "auto", a number, a preset, or a LossScale to share."""
    device: str = ""
    """The name of the device to plan for; "": the device that the model is on."""
    measure: bool = False
    """True: time ops and casts on the device. False: use the prices in the table of devices."""
    memory: float = 0.0
    """Price, in seconds, of each byte of activations that is kept for backward; 0: plan for speed alone."""
    parity: float | None = 1.0
    """A number: all graphs share one plan, chosen by a cost in which a training step has the weight `parity`, from 0 to 1, and a pass
    without gradients the rest. None: each graph has its own plan."""
    pad: PadPolicy = field(default_factory=PadPolicy)
    products: ProductPolicy | None = None
    """Rules for the products (matmuls) that may read fp8 copies of their operands; None: no product runs in fp8."""
    frozen: tuple[str, ...] | None = None
    """Names of the fp32 parameters that took gradients before the model was frozen; None: the model is not frozen."""


def policy_on(row: Device, options: Options, note: Callable[[str], None], kept: bool, products: ProductPolicy | None) -> Policy:
    """Return the policy that `options` give on the device `row`, and call `note` with each restriction, such as a device without a gain.

    `kept`: whether a block keeps low copies of weights now. `products`: the part of `options.products` that the kernels on the device can
    run (see `fp8_units.runnable`).
    """
    low = options.low
    if low is None:
        low = best_format(row)
        if low is None:
            note(f"left in fp32: {row.name} gains nothing from low precision; pass dtype='bf16' to rewrite anyway")
    elif low is not FP32 and low.name not in row.low_formats:
        note(f"{low.name} on {row.name}: done as asked, though its matrix units have no {low.name}")
    if products is not None and low != BASE:
        note(f"products: fp8 is made of {BASE.name} alone, and the low format on {row.name} is {(low or FP32).name}; none runs in fp8")
        products = None
    elif products is not None and products.preset.priced and not row.fp8:
        note(f"products: {row.name} multiplies no fp8, so products run in bf16; device='h100' plans for a device that does")
    return Policy(
        low or FP32, options.lists, options.overrides, keeps_copies=bool(options.cache_weights) and kept, device=options.device,
        measure=options.measure, memory=options.memory, parity=options.parity, products=products,
        may_decline=options.low is None and options.backend == "eager" and not options.overrides,
    )  # fmt: skip
