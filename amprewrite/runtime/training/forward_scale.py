"""Which scale the gradients of one forward have: the same number for all graphs that run in it, in each backward through them.

A forward has the loss scale, or 1 in its place. Under a dynamic scale, which an overflowing step brings down, it has 1 where no step
would do so (`ScaleUse`):

1. until an optimizer is known, as under torch.autocast without a GradScaler, and while all parameters are frozen;
2. in eval mode, until a step follows forwards in eval mode alone: no step follows saliency maps, forces and attacks.

The loss scale is there for the gradient of the loss. Gradients that are taken on the way to it, as forces, penalties and the inner steps
of meta-learning are, would be scaled beyond fp16, and the loss would be NaN. So a backward has the scale, or 1 in its place:

1. a backward while the forward is under way has 1: what it gives becomes part of the model's result;
2. `backward()`, which keeps a gradient in `.grad`, has the scale, through what an earlier backward gave, too (`scale_ops.py`);
3. `torch.autograd.grad` has the scale where two of three things hold: the scale is static, so that its user asks for it; a weight gets a
   gradient; `create_graph` is not set, so that no loss is made of what it gives. So under a dynamic scale penalties are taken with 1 and
   their loss is finite. If the loss's own backward overflows then, the scale comes down. Nothing takes a static one down: penalties on
   gradients of weights have it, as in a loop that scales the inner loss by hand, and their loss meets gradients that are scaled already;
4. a backward inside another through the same forward, as a hook may take it, has what that one has, which goes on with it.

Scale and inverse are read when gradients pass, and written when a backward enters. Where a backward may come that has 1 (code of the model
runs between graphs, an input takes gradients, or a weight is computed), a forward has copies of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from amprewrite.graphs.fx.ops.on_device import on_device
from amprewrite.graphs.fx.ops.scale_ops import tell_of_entries
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.runtime.ambient.hook_watch import hook_result
from amprewrite.runtime.ambient.past import asking_node
from amprewrite.runtime.training.loss_scale import LossScale
from amprewrite.torch_internals.autograd import call_after_backward, current_backward

Pair = tuple[Tensor, Tensor]


class ScaleUse:
    """Which forwards of one model use its loss scale."""

    def __init__(self, scale: LossScale) -> None:
        self.scale = scale
        self._withheld = self._stepped = self._learns_in_eval = False
        """True if a forward went without an optimizer; if one stepped since; if all forwards before the latest step were in eval mode."""
        self._modes: set[bool] = set()
        """Modes of the forwards since the latest step: True for eval mode."""
        self._ones: dict[torch.device, Tensor] = {}

    @property
    def evaluates(self) -> bool:
        """True if all forwards since the latest step were in eval mode."""
        return self._modes == {True}

    @property
    def unscaled(self) -> bool:
        """True if a step now would use gradients of a forward that did not use the dynamic scale."""
        return self._withheld or (self.evaluates and not self._learns_in_eval)

    def pair(self, device: torch.device, learns: bool, evaluates: bool, known: bool, look: Callable[[], bool]) -> Pair:
        """(scale, inverse) for one forward. `learns`: a parameter takes gradients. `known`: an optimizer is, or `look` finds one."""
        grad = torch.is_grad_enabled()
        if self.scale.kind != "dynamic":
            return self.scale.snapshot(device)
        if not learns:
            return self._one(device)
        if grad:
            self._modes.add(evaluates)
            if evaluates and not self._learns_in_eval:
                self.scale.withheld = not known
                return self._one(device)
        if look():
            self._withheld = self._withheld and not self._stepped
            return self.scale.snapshot(device)
        if grad:
            self._withheld, self._stepped, self.scale.withheld = True, False, True
        return self._one(device)

    def _one(self, device: torch.device) -> Pair:
        one = self._ones.get(device)
        if one is None:
            with torch.inference_mode(False), torch.no_grad():
                one = self._ones[device] = torch.ones((), dtype=torch.float32, device=device)
        return one, one

    def step(self) -> None:
        """Note that an optimizer steps."""
        self._stepped = True
        if self._modes:
            self._learns_in_eval, self._modes = self.evaluates, set()


class _Backward:
    """A backward that entered a forward: autograd calls this at its end, and drops it when the backward fails."""

    def __init__(self) -> None:
        self.over = False

    def __call__(self) -> None:
        self.over = True


class ForwardScale:
    """A scale and its inverse: 0-dim fp32 tensors, copies of its own if `copied`.

    `entered` hears of backwards: the forward, autograd's number of the backward, and whether it gives weights gradients.
    """

    def __init__(self, pair: Pair, copied: bool, static: bool, entered: Callable[[ForwardScale, int, bool], None], heard: bool) -> None:
        """`heard`: backwards are told of though the scale is 1, or the same for all of them."""
        self.static, self.entered, self.heard = static, entered, heard
        self.copied = False
        self.under_way = True
        self._backward: weakref.ref[_Backward] | None = None
        """The backward that entered last."""
        self.weights: list[Tensor] = []
        """Parameters that its graphs read and that take gradients, or tensors in their place."""
        self._fed: list[Node] = []
        """Of inputs of its graphs that are computed from something that takes gradients."""
        self._first, self._scaled = pair, True
        self._pairs = {pair[0].device: pair}
        if copied:
            self.copy_scale()

    def copy_scale(self) -> None:
        """Have copies of its own, before a graph has run."""
        scale, inverse = self._first
        if not self.copied and (self.heard or scale is not inverse):  # the same tensor is both where the scale is 1
            self.copied = True
            with torch.inference_mode(False), torch.no_grad():
                self._pairs = {scale.device: self._own((scale.clone(), inverse.clone()))}

    def _own(self, pair: Pair) -> Pair:
        for number in pair:
            tell_of_entries(number, self.enter)
        return pair

    def on(self, device: torch.device) -> Pair:
        """The scale and its inverse on `device`."""
        pair = self._pairs.get(device)
        if pair is None:
            scale, inverse = next(iter(self._pairs.values()))
            pair = on_device(scale, device), on_device(inverse, device)
            self._pairs[device] = self._own(pair) if self.copied else pair
        return pair

    def watch(self, results: Iterable[Any], weights: Sequence[Tensor], fed: Sequence[Tensor]) -> None:
        """Watch for backwards that enter one of these results of a graph that read `weights` and was `fed` these; all take gradients."""
        if self.copied or self.heard:
            self.weights += weights
            self._fed += [value.grad_fn for value in fed if value.grad_fn is not None]
            for result in results:
                if isinstance(result, Tensor) and result.grad_fn is not None:
                    hook_result(result, self._entered)

    @uncaptured
    def _entered(self, gradient: Tensor) -> None:
        self.enter()

    @uncaptured
    def enter(self) -> None:
        """Decide for the backward under way, if it is a new one."""
        number = current_backward()
        if number < 0 or self.in_backward():
            return
        backward = _Backward()
        kept, taken = _gives_gradient(self.weights or self._fed)
        self.entered(self, number, (kept or taken) and bool(self.weights) and not self.under_way)
        if self.copied:
            further = torch.is_grad_enabled()  # create_graph=True: what it gives is differentiated again
            self._set(not self.under_way and (kept or self.static + taken + (not further) > 1))
        # Set last: until then, another thread of this backward also sets the scale, to the same value, before it reads the scale.
        call_after_backward(backward)  # type: ignore[attr-defined]
        self._backward = weakref.ref(backward)

    def in_backward(self) -> bool:
        """Whether a backward that entered has not ended."""
        backward = None if self._backward is None else self._backward()
        return backward is not None and not backward.over

    def _set(self, scaled: bool) -> None:
        if scaled == self._scaled:
            return
        for device, pair in self._pairs.items():
            for number, true in zip(pair, self._first, strict=True):
                value = number.data  # a compiled graph that saved it for backward is to read the new number
                value.copy_(on_device(true, device)) if scaled else value.fill_(1)
        self._scaled = scaled


def _gives_gradient(tensors: Sequence[Tensor | Node]) -> tuple[bool, bool]:
    """Whether the backward under way gives one of these a gradient: to be kept in a `.grad`, and to torch.autograd.grad.

    Most backwards of a loss give the first one a gradient that is kept: then no other is asked about.
    """
    taken = False
    for each in tensors:
        node = get_gradient_edge(each).node if isinstance(each, Tensor) else each
        runs = _runs(node)
        leaf = isinstance(each, Tensor) and each.is_leaf
        if runs and (leaf or any(_runs(further) is not False for further, _ in node.next_functions if further is not None)):
            return True, taken
        taken |= runs is not False
    return False, taken


def _runs(node: Any) -> bool | None:
    """Whether the backward under way runs an autograd node; None for a leaf's whose gradient it hands to torch.autograd.grad."""
    try:
        return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]
    except RuntimeError:  # torch refuses to answer in that case, and in no other during a backward
        return None


class ForwardScales:
    """Gives each forward of a model its scale: `snapshot(device, evaluates)`. `heard` gets backwards that give weights gradients."""

    def __init__(
        self, root: nn.Module, static: bool, snapshot: Callable[[torch.device, bool], Pair],
        listens: Callable[[], bool], heard: Callable[[int, Sequence[Tensor]], None],
    ) -> None:  # fmt: skip
        self.root, self.static, self.snapshot, self.listens, self.heard = root, static, snapshot, listens, heard
        self._entered: weakref.ref[ForwardScale] | None = None
        """The forward that a backward has entered last."""

    def of_forward(self, device: torch.device, in_parts: bool) -> ForwardScale:
        """The scale of a forward that begins, made on `device`. With `in_parts` code of the model may run between its graphs."""
        entered = None if self._entered is None else self._entered()
        if entered is not None and entered.in_backward() and asking_node() is not None:
            return entered  # what this recomputation saves is read by that backward
        evaluates = not any(module.training for module in self.root.modules())
        return ForwardScale(self.snapshot(device, evaluates), in_parts, self.static, self._backward_entered, self.listens())

    def _backward_entered(self, forward: ForwardScale, number: int, learns: bool) -> None:
        self._entered = weakref.ref(forward)
        if learns:
            self.heard(number, forward.weights)


__all__ = ["ForwardScale", "ForwardScales", "ScaleUse"]
