"""Which matrix products of a call ran in fp32 without a word of it in the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution", "mkldnn_convolution", "_convolution",
    "mkldnn_rnn_layer", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math", "_trilinear", "linear",
}  # fmt: skip


class Products(TorchDispatchMode):
    """The products that run, each with whether all that it multiplies is fp32.

    It looks into the bodies of cond and of while_loop; those of other higher-order ops run unseen.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._higher(func, args, kwargs or {})
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            operands = [leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.seen.append((name, set(operands) == {torch.float32}))
        return func(*args, **(kwargs or {}))

    def _higher(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.name() == "cond":
            with self:
                return args[1 if args[0] else 2](*args[3])
        if func.name() == "while_loop":
            goes_on, body, carried, more = args
            with self:
                while goes_on(*carried, *more):
                    carried = body(*carried, *more)
            return carried
        return func(*args, **kwargs)


def products(call: Callable[[], Any]) -> list[tuple[str, bool]]:
    """The products of a call's forward, and whether each ran in fp32.

    Dynamo marks for good what it skips under a mode, torch's own code around higher-order ops too, which then fail in other tests.
    """
    try:
        with Products() as mode:
            call()
    finally:
        torch._dynamo.reset()
    return mode.seen


def untold(amp: nn.Module, call: Callable[[], Any]) -> list[str]:
    """Products of `call` that ran in fp32, of which the plan of `amp` tells nothing, and no list of what was skipped.

    The call captures first. Products of a body run as often as its loop does, so any high product of a body tells of them all.
    """
    call()
    call()
    ran = [name for name, fp32 in products(call) if fp32]
    plan = amp.plan
    if plan.skipped:
        return []
    high = [node for region in plan.regions for node in region.nodes if node.flops and node.colour.value == "high"]
    inside = any("/" in region.name or "." in region.name for region in plan.regions)
    return ran[len(high):] if not (inside and high) else []


__all__ = ["PRODUCTS", "Products", "products", "untold"]
