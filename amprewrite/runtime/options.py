"""The options of one rewrite, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from amprewrite.ir.evidence.keep_high import KeepHigh
from amprewrite.ir.evidence.ranges import Calibration
from amprewrite.ir.plans.plan import ModelPlan
from amprewrite.ir.policies.pad_policy import PadPolicy
from amprewrite.ir.policies.policy import Override, Policy
from amprewrite.ir.policies.product_policy import ProductPolicy
from amprewrite.runtime.parts import MODEL, Granularity
from amprewrite.tables.devices import Device, best_format
from amprewrite.tables.formats import FP32, Format
from amprewrite.tables.ops.op_lists import OpLists
from amprewrite.tables.recipes import BASE

WHERE_READ = frozenset({"cpu"})
"""Kinds of devices with no launches to save. There a cast of each weight where it is read is faster than one of many: by 3 to 10 % of a
step of BERT, GPT-2, Llama, ViT and T5 of 12 small layers (torch 2.13, bf16)."""


@dataclass(frozen=True)
class Options:
    """The options of one `rewrite` call, checked."""

    low: Format | None
    """None: what the device does best, which may be nothing."""
    lists: str | OpLists = "default"
    overrides: tuple[Override, ...] = ()
    backend: str | Callable[..., Any] = "eager"
    cache_weights: bool | str = True
    """"step": in training, too."""
    strict: bool = False
    given: ModelPlan | None = None
    granularity: Granularity = MODEL
    """The result of `parse_granularity`."""
    calibration: Calibration | None = None
    keep_high: KeepHigh | None = None
    loss_scale: Any = "auto"
    """An argument of `parse_loss_scale`: "auto", a number, a preset, or a LossScale to share."""
    device: str = ""
    """The device to plan for; "": the one at hand."""
    measure: bool = False
    memory: float = 0.0
    parity: float | None = 1.0
    """How much a step of training counts in the prices that all graphs share; None: each graph is decided by itself."""
    pad: PadPolicy = field(default_factory=PadPolicy)
    products: ProductPolicy | None = None
    """Which low products may read fp8 copies of their operands; None: none."""
    frozen: tuple[str, ...] | None = None
    """Names of the fp32 parameters of a frozen model that took gradients before; None: not frozen."""

    def casts_at_once(self, compiles: bool, training: bool, device: str, kept: bool) -> bool:
        """Whether many weights are cast in one launch; if not, a graph casts each weight where it reads it.

        They are where copies are `kept` over calls. Otherwise a compiler fuses and frees casts that are in the graph.
        """
        if compiles and self.backend != "eager":
            return bool(self.cache_weights) and kept and not training
        kept = self.cache_weights == "step" if training else kept
        return bool(self.cache_weights) and (kept or device not in WHERE_READ)


def policy_on(row: Device, options: Options, note: Callable[[str], None], kept: bool | str, products: ProductPolicy | None) -> Policy:
    """The policy of these options on a device; `note` is told if it gains nothing.

    `kept`: how long low copies of weights are kept. `products`: what of `options.products` the kernels at hand can run.
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
        low or FP32, options.lists, options.overrides, cache_weights=options.cache_weights and kept, device=options.device,
        measure=options.measure, memory=options.memory, parity=options.parity, products=products,
        may_decline=options.low is None and options.backend == "eager" and not options.overrides,
    )  # fmt: skip


__all__ = ["Options", "policy_on"]
