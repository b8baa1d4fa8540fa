"""Low copies of weights in training: one launch makes them all, and a few bring their gradients back.

1. All copies of a graph are made before it runs, from the weights as they are then.
2. A block of them is linked to its weights by one autograd node. In backward it gives the gradients of the block in fp32, unscaled, in
   one multi-tensor launch for the casts and one for the scale. What comes in fp32 is multiplied where it lies, if nothing else refers
   to it, as PyTorch keeps a gradient without a copy then. What comes low is let go as it is cast, towards the end of a backward in
   several launches: so the peak of the backward stays what it is without blocks.
3. Of the nodes that are ready autograd runs the one that was made last (torch/csrc/autograd/engine.cpp, CompareNodeTaskTime). Linked
   before the graph, every block waits for the whole backward: activations are gone by then, and make room for it. Where
   gradients take more than activations, a single block goes `early`, as soon as it has its gradients: low ones are gone before the
   backward ends. Where ranks train, a graph of eager code links a block in front of the op that first reads one of its copies: so the
   ranks reduce its gradients meanwhile.
4. The plan says which weights are a block (`passes/plan/plan_gradient_blocks.py`).
5. A weight with a hook on its gradient has a node to itself: autograd calls the hook whenever the node runs, with None if other weights
   of its block have gradients in a backward and it has none.
6. Weights that are more than dense memory (DTensor and other subclasses, duals of forward-mode AD) are cast one by one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from amprewrite.graphs.fx.ops.fused_copy import is_plain
from amprewrite.graphs.fx.ops.pad_ops import logical_part, pad_cast
from amprewrite.graphs.fx.ops.scale_ops import AT_ONCE, Widening, leaving_many, on_device, unscale_gradient
from amprewrite.graphs.fx.uncaptured import GradMode, uncaptured, unhooked, unselected
from amprewrite.graphs.fx.weights.copy_memory import PLAIN
from amprewrite.graphs.fx.weights.weight_cache import WeightCache
from amprewrite.ir.plans.pad_plan import Layout

ELEMENTS = 1 << 27
"""Elements of a block, 256 MB of low gradients that wait for the last of them. A weight of so many is a block by itself."""
ELEMENTS_APART = 1 << 22
"""The same where several ranks train: 16 MB, less than a bucket of DDP (25 MB), whose reduction must not wait."""

_USES = torch.Tensor._use_count  # type: ignore[attr-defined]
_FIRST = 2**63
"""The number of an autograd node that runs before all others that are ready, but those that hand gradients to weights."""
FEW = 1 << 19
"""Bytes of low gradients that may be cast at once anywhere, and a SHARE of all: else ever smaller launches would end a backward."""
SHARE = 1 / 32


def ranks_train() -> bool:
    """Whether this process is one of several that train together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def block_size() -> int:
    """How many elements of weights may share one autograd node, in this process as it is now."""
    return ELEMENTS_APART if ranks_train() else ELEMENTS


class LinkedCopies:
    """The copies that one training graph takes of its weights; a `dtype` that is the weight's own only unscales its gradient."""

    def __init__(
        self, dtypes: Sequence[torch.dtype], layouts: Sequence[Layout], cache: WeightCache, blocks: Sequence[Sequence[int]] | None = None,
        rooms: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """`blocks` are the places of the weights that share an autograd node; None: all share one.

        `rooms` are the bytes that a backward adds after each block; None: low gradients may not be let go.
        """
        self.dtypes, self.layouts, self.cache = dtypes, layouts, cache
        self.blocks = (range(len(dtypes)),) if blocks is None else blocks
        self.rooms = rooms
        self.early = False
        """Whether a block is cast as soon as it has all its gradients, before the rest of the backward."""
        self._made: tuple[int, ...] | None = None
        """Places of the weights that are copied; the graph is guarded on their dtypes."""

    def take(self, weights: Sequence[Tensor], inverse: Tensor | None) -> list[Tensor]:
        """A copy of each weight as it is now; its gradient arrives at the weight times `inverse`, a 0-dim fp32 tensor.

        Without gradients, too, for the graph may switch them on.
        """
        copies, links = self.begin(weights, inverse)
        for number, block in enumerate(self.blocks):
            for place, linked in zip(block, links(number, [copies[place] for place in block]), strict=True):
                copies[place] = linked
        return copies

    def begin(self, weights: Sequence[Tensor], inverse: Tensor | None) -> tuple[list[Tensor], Links]:
        """The copies of `take` before they are linked, and what links a block of them; weights to be cast one by one as they are."""
        copies = list(weights)
        if forward_ad._current_level >= 0 or not PLAIN.issuperset(map(type, weights)):
            return copies, Links(self, copies, inverse, None, 0)
        if self._made is None:
            self._made = tuple(place for place, w in enumerate(weights) if self.dtypes[place] != w.dtype or self.layouts[place])
        made = self._made
        dtypes, layouts = [self.dtypes[place] for place in made], [self.layouts[place] for place in made]
        with GradMode(on=True):
            found = self.cache.take_with_gradients([weights[place] for place in made], dtypes, layouts)
        for place, copy in zip(made, found, strict=True):
            copies[place] = copy
        least = max(FEW, int(SHARE * sum(copy.nbytes for copy in found)))
        return copies, Links(self, list(weights), inverse, _Check(inverse, _one_alone()), least)


class Links:
    """Links the copies of one call to their weights, block by block."""

    __slots__ = ("_check", "_inverse", "_least", "_of", "_weights")

    def __init__(self, of: LinkedCopies, weights: list[Tensor], inverse: Tensor | None, check: _Check | None, least: int) -> None:
        """`check` None: weights are cast one by one."""
        self._of, self._weights, self._inverse, self._check, self._least = of, weights, inverse, check, least

    def __call__(self, number: int, copies: Sequence[Tensor]) -> list[Tensor]:
        """The copies of a block, each linked to its weight if that takes a gradient."""
        of, weights, block = self._of, self._weights, self._of.blocks[number]
        with unselected(), GradMode(on=True):
            if self._check is None:
                return [_alone(weights[place], of.dtypes[place], of.layouts[place], self._inverse) for place in block]
            found = list(copies)
            learning = [at for at, place in enumerate(block) if weights[place].requires_grad]
            together = [at for at in learning if not weights[block[at]]._backward_hooks]
            apart = [[at] for at in learning if weights[block[at]]._backward_hooks]
            for chosen in (together, *apart) if together else apart:
                layouts = [of.layouts[block[at]] for at in chosen]
                how = Widening(room=None if of.rooms is None else of.rooms[number], least=self._least)
                linked = _Link.apply([found[at] for at in chosen], layouts, self._check, how, *[weights[block[at]] for at in chosen])
                if of.early:
                    linked[0].grad_fn._set_sequence_nr(_FIRST)
                for at, copy in zip(chosen, linked, strict=True):
                    found[at] = copy
            return found


def link_block(links: Links, number: int, *copies: Tensor) -> list[Tensor]:
    """What a graph calls in front of the op that first reads one of the copies of a block."""
    return links(number, copies)


def _alone(weight: Tensor, dtype: torch.dtype, layout: Layout, inverse: Tensor | None) -> Tensor:
    """One copy, with torch's own derivatives if there is no scale."""
    if inverse is not None and dtype == weight.dtype and not layout:
        return unscale_gradient(weight, inverse)
    return pad_cast(weight, dtype, layout, inverse)


Counts = tuple[int, ...]
"""How many Python objects and C++ objects refer to a gradient, and how many to its memory; if it is a view, the same of its base."""


class _Check:
    """The factor for the gradients of one forward, and a flag for each backward and device: whether all gradients there are finite."""

    def __init__(self, inverse: Tensor | None, one: frozenset[Counts] | None) -> None:
        self.inverse, self.one = inverse, one
        self._flags: dict[tuple[int, torch.device], Tensor] = {}
        self.counted: Counts = ()
        """Of the gradient that came last, while that is tried out: `one` is None."""

    def on(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """The factor, and the flag of the backward that runs now, on the device of a block. Blocks there share the flag."""
        if self.inverse is None:
            return None, None
        backward = torch._C._current_graph_task_id()
        flag = self._flags.get((backward, device))
        if flag is None:
            # Autograd runs each device in a thread of its own: so a dict is replaced, and what two threads make at once is right for both.
            flag = torch.zeros((), dtype=torch.float32, device=device)
            self._flags = {key: kept for key, kept in self._flags.items() if key[0] == backward} | {(backward, device): flag}
        return on_device(self.inverse, device), flag


class _Link(torch.autograd.Function):
    """Copies of weights that were made before, as if they were cast now; absent gradients stay absent."""

    @staticmethod
    def forward(
        ctx: Any, copies: list[Tensor], layouts: list[Layout], check: _Check, how: Widening, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.check, ctx.how, ctx.dtypes = check, how, [weight.dtype for weight in weights]
        ctx.padded = [(layout, weight.shape) for layout, weight in zip(layouts, weights, strict=True)] if any(layouts) else ()
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        alone = _alone_among(gradients, ctx.check)
        inner = list(gradients)
        for place, (layout, _) in enumerate(ctx.padded):
            gradient = inner[place]
            if layout and gradient is not None:
                inner[place] = logical_part(gradient, layout)
        how = replace(ctx.how, alone=alone)
        inverse, flag = ctx.check.on(next(gradient.device for gradient in gradients if gradient is not None))
        left = list(leaving_many(inner, inverse, ctx.dtypes, ctx.needs_input_grad[4:], flag, how))
        for place, (layout, shape) in enumerate(ctx.padded):
            gradient = left[place]
            if layout and gradient is not None:
                left[place] = gradient.reshape(shape)
        return None, None, None, None, *left


# -- gradients that nothing else refers to ----------------------------------------------------------
def _alone_among(gradients: Sequence[Tensor | None], check: _Check) -> frozenset[int]:
    """Places of the gradients that may be written or let go: nothing else refers to them, and they are the whole of memory that torch owns.

    A gradient can be another's view, be saved, be captured by `torch.autograd.grad`, or lie in an array of NumPy's.
    """
    found: list[int] = []
    for place, gradient in enumerate(gradients):
        if gradient is None or not is_plain(gradient):
            continue
        storage = gradient.untyped_storage()
        held = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
        counts: Counts = (sys.getrefcount(gradient), _USES(gradient), sys.getrefcount(storage), held)
        if gradient._is_view():
            base: Any = gradient._base
            counts += (sys.getrefcount(base), _USES(base))
        if check.one is None:
            check.counted = counts
        elif counts in check.one and storage.resizable() and gradient.is_contiguous() and storage.nbytes() == gradient.nbytes:
            found.append(place)
    return frozenset(found)


@functools.cache
def _one_alone() -> frozenset[Counts]:
    """What is counted of a gradient that nothing else refers to, tried out: it depends on versions of Python and torch.

    Once for a tensor by itself, once for a transposed one, as products of matrices give.
    """
    found = set()
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad(), unhooked():
        for transposed in (False, True):
            weight, factor, check = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3), _Check(torch.ones(()), None)
            (linked,) = _Link.apply([weight.detach()], [()], check, AT_ONCE, weight)
            torch.autograd.grad((linked.t() * factor.t() if transposed else linked * factor).sum(), weight)
            found.add(check.counted)
    return frozenset(found)


__all__ = ["LinkedCopies", "Links", "block_size", "link_block", "ranks_train"]
