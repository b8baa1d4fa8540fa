"""Run one fp8 product on the GPU before a plan relies on fp8 products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from amprewrite.graphs.fx.ops.fp8_units import fails_on, makes_copies
from amprewrite.ir.policies.product_policy import ProductPolicy


def runnable(products: ProductPolicy | None, kind: str, note: Callable[[str], None]) -> ProductPolicy | None:
    """Return the part of `products` that works on a device of this `kind`, such as "cuda"; None if no fp8 product works there.

    If our kernel that makes fp8 copies does not run there, the returned policy assumes the slower copies that torch makes. `note` is
    called with the reason for each restriction.
    """
    if products is None:
        return None
    if why := fails_on(torch.device(kind), products.preset.recipe):
        note(f"products: this GPU should multiply fp8, but a first product failed ({why}), so products run in bf16")
        return None
    if not products.fused and not makes_copies(torch.device(kind)):
        note("products: the kernel that makes fp8 copies cannot run here, so copies are priced as torch makes them, in many passes")
        return replace(products, kernel=False)
    return products
