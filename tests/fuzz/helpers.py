"""The classes and functions that the statements of programs use, as source text."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch


class Sink(torch.autograd.Function):
    """Gives its operands; what nobody reads of them gets a gradient of None, not zeros, as from what DDP puts behind a model."""

    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(each.view_as(each) for each in given)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


@dataclasses.dataclass
class Held:
    """What a caller passes beside the first input."""

    y: Any = None
    z: Any = None


HELPERS = {
    "Sink": f"from typing import Any\n\n\n{inspect.getsource(Sink)}",
    "maybe_autocast": """
def maybe_autocast(device, enabled):
    on = torch.is_autocast_enabled(device) or enabled
    return torch.autocast(device, enabled=enabled) if on else contextlib.nullcontext()
""",
    "frequencies": """
def frequencies(t):
    width = t.shape[-1]
    return 100.0 ** (-torch.arange(width, device=t.device) / width)
""",
    "turned": """
def turned(t, angles):
    half = t.shape[-1] // 2
    return t * angles.cos() + torch.cat((-t[..., half:], t[..., :half]), -1) * angles.sin()
""",
    "Square": """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.save_for_backward(t)
        return t * t

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]
""",
    "Product": """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, w):
        ctx.save_for_backward(t, w)
        return t @ w

    @staticmethod
    def backward(ctx, g):
        t, w = ctx.saved_tensors
        return g @ w.mT, t.reshape(-1, t.shape[-1]).mT @ g.reshape(-1, g.shape[-1])
""",
    "Bounded": """
class Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, w):
        ctx.save_for_backward(t, w)
        return t @ w

    @staticmethod
    def backward(ctx, g):
        t, w = ctx.saved_tensors
        g = g.clamp(-0.5, 0.5)
        return g @ w.mT, t.reshape(-1, t.shape[-1]).mT @ g.reshape(-1, g.shape[-1])
""",
    "Through": """
class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t.sign()

    @staticmethod
    def backward(ctx, g):
        return g * 2
""",
    "Doubled": """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, b):
        doubled = b * 2
        ctx.save_for_backward(doubled)
        return t * doubled

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None
""",
    "Two": """
class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, w):
        ctx.save_for_backward(t, w)
        return t @ w, t + 1

    @staticmethod
    def backward(ctx, g, h):
        t, w = ctx.saved_tensors
        return g @ w.mT + h, t.reshape(-1, t.shape[-1]).mT @ g.reshape(-1, g.shape[-1])
""",
    "Wide": """
class Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, w):
        ctx.save_for_backward(t, w)
        return (t * 2.0**17) @ w * 2.0**-17

    @staticmethod
    def backward(ctx, g):
        t, w = ctx.saved_tensors
        return (g * 2.0**17) @ w.mT * 2.0**-17, t.reshape(-1, t.shape[-1]).mT @ g.reshape(-1, g.shape[-1])
""",
    "Unlearnt": """
class Unlearnt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, w):
        ctx.save_for_backward(w)
        return t @ w

    @staticmethod
    def backward(ctx, g):
        return g @ ctx.saved_tensors[0].mT, None
""",
    "region": """
@torch.compiler.nested_compile_region
def region(t, w):
    return torch.relu(t @ w) + t
""",
    "region_writing": """
@torch.compiler.nested_compile_region
def region_writing(t, w):
    t.view(-1)[:2].add_(2.0)
    return t @ w
""",
    "region_of_more": """
@torch.compiler.nested_compile_region
def region_of_more(t, w):
    return t @ w, None, t * 2
""",
    "Joined": """
class Joined(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.one, self.other = nn.Conv1d(channels, width, 1), nn.Conv1d(channels, width, 1)
        self.norm, self.last = nn.BatchNorm1d(2 * width), nn.Conv1d(2 * width, 4, 1)

    def forward(self, t):
        return self.last(self.norm(torch.cat((self.one(t), self.other(t)), 1)).relu())
""",
    "Out": """
@dataclasses.dataclass
class Out:
    first: object
    rest: object


torch.utils._pytree.register_dataclass(Out)
""",
    "keep_products": """
keep_products = functools.partial(
    torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
)
""",
    "Named": """
Named = collections.namedtuple("Named", ["first", "rest"])
""",
}
"""Classes and functions that statements and layers use, by name; a program carries those that it names."""
