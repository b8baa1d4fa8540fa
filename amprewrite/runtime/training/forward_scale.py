"""Decide for each forward pass whether its gradients are multiplied by the loss scale or by 1.

In one backward pass, all graphs of a forward use the same factor. A dynamic scale shrinks only when an optimizer step overflows. So a
forward uses 1 instead (`ScaleUse`) if probably no optimizer step follows:

1. while no optimizer of the model is known, or all parameters are frozen;
2. in eval mode, where saliency maps and adversarial attacks compute gradients but step no optimizer. Once an optimizer has stepped after
   forwards that were all in eval mode, eval mode uses the scale, too.

The loss scale is meant for the gradient of the loss. Gradients from which the loss is computed (forces, penalties, inner steps of
meta-learning) would overflow fp16 if they were scaled, and the loss would be NaN. So each backward chooses the scale or 1:

1. A backward while the forward is still running uses 1, because its gradients become part of the model's result.
2. `backward()`, which stores gradients in `.grad`, uses the scale, even if it differentiates gradients of an earlier backward
   (`scale_ops.py`).
3. `torch.autograd.grad` uses the scale if at least two of three conditions hold: the scale is static (the user asked for it); a weight
   gets a gradient; `create_graph` is off (no loss is computed from the gradients). Under a dynamic scale, a gradient penalty therefore
   uses 1, and its loss is finite. If the backward of that loss overflows, the dynamic scale shrinks. A static scale never shrinks. Under
   it, a penalty reads scaled gradients of weights, as in a loop that scales the inner loss by hand, and the backward of its loss runs
   through scaled gradients inside the model.
4. A backward inside another backward through the same forward, for instance in a hook, uses the factor of the outer backward.

In a backward, graphs read the scale and its inverse from two tensors. A forward has its own copies of both if a backward through it may
use 1. Then each backward sets the copies to the scale or to 1 when it first reaches a graph of the forward. A backward may use 1 if code
of the model runs between graphs, if an input requires gradients, or if a weight is computed from other tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from amprewrite.graphs.fx.ops.on_device import on_device
from amprewrite.graphs.fx.ops.scale_ops import is_held, tell_of_entries
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.runtime.ambient.hook_watch import hook_result
from amprewrite.runtime.ambient.past import existed, next_node
from amprewrite.runtime.training.loss_scale import LossScale
from amprewrite.torch_internals.dispatch import call_after_backward, current_backward

Pair = tuple[Tensor, Tensor]


class ScaleUse:
    """Decides which forward passes of one model use its loss scale. The other passes use the number 1 in its place."""

    def __init__(self, scale: LossScale) -> None:
        self.scale = scale
        self._withheld = self._stepped = self._learns_in_eval = False
        """`_withheld`: a forward used 1 because no optimizer was known. `_stepped`: an optimizer has stepped since the latest such forward.

        `_learns_in_eval`: all forwards with gradients between the latest two steps were in eval mode.
        """
        self._modes: set[bool] = set()
        """Modes of the forwards with gradients since the latest step: True for eval mode, False for training mode."""
        self._ones: dict[torch.device, Tensor] = {}

    @property
    def evaluates(self) -> bool:
        """True if forward passes with gradients have run since the latest optimizer step, all of them in eval mode."""
        return self._modes == {True}

    @property
    def unscaled(self) -> bool:
        """True if an optimizer step now would use gradients of a forward that used 1 in place of the dynamic scale."""
        return self._withheld or (self._modes == {True} and not self._learns_in_eval)

    def pair(self, device: torch.device, learns: bool, evaluates: bool, known: bool, look: Callable[[], bool]) -> Pair:
        """Return (scale, 1/scale) for one forward: 0-dim fp32 tensors on `device`. Both are the same tensor if the forward uses 1.

        `learns`: a parameter requires gradients. `evaluates`: the model is in eval mode. `known`: an optimizer of the model is known.
        `look()` searches for an optimizer, and returns True if it finds one.
        """
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
        if known or look():
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
        """Record that an optimizer of the model steps."""
        self._stepped = True
        if self._modes:
            self._learns_in_eval, self._modes = self._modes == {True}, set()


class _Backward:
    """Stands for one backward pass through the graphs of a forward. Autograd calls this object at the end of the pass: `over` becomes True.
    If the pass fails, autograd frees the object without a call."""

    def __init__(self) -> None:
        self.over = False

    def __call__(self) -> None:
        self.over = True


class ForwardScale:
    """The loss scale of one forward, and the inverse of the scale: 0-dim fp32 tensors that graphs of this forward read in a backward.

    When a backward pass first reaches a graph of this forward, `entered` is called with this object, autograd's id of the backward, and a
    bool. The bool is True if the forward has ended and the backward computes gradients of weights that the forward read.
    """

    def __init__(self, pair: Pair, copied: bool, static: bool, entered: Callable[[ForwardScale, int, bool], None], heard: bool) -> None:
        """`pair`: the scale and its inverse. `copied`: copy both now, so that a backward other than that of the loss can set them to 1.

        `static`: the scale is constant. `entered`: see the class. It is called only if the scale is copied or `heard` is True.
        """
        self.static, self.entered, self.heard = static, entered, heard
        self.copied = False
        self.under_way = True
        self._backward: weakref.ref[_Backward] | None = None
        """Weak reference to the last backward pass that reached a result of this forward. Autograd keeps the object until the pass ends."""
        self.weights: list[Tensor] = []
        """Weights that graphs of this forward read and that require gradients: parameters, or tensors computed from them."""
        self._fed: list[Node] = []
        """Autograd nodes of graph inputs that were computed from tensors that require gradients."""
        self._passed_over = self._fed_later = False
        """True if graphs read weights (`_passed_over`) or inputs (`_fed_later`) that `weights` and `_fed` leave out (see `watch`)."""
        self._first_node = next_node()
        """Nodes with a lower number existed before this forward ran a graph."""
        self._first, self._scaled = pair, True
        self._pairs = {pair[0].device: pair}
        if copied:
            self.copy_scale()

    def copy_scale(self) -> None:
        """Copy the scale and its inverse, so that a backward can set the copies to 1. Call it before a graph of this forward runs.

        Does nothing if both are copied already, or if this forward uses 1 and `entered` need not be called (`heard` is False).
        """
        scale, inverse = self._first
        if not self.copied and (self.heard or scale is not inverse):  # a scale of 1 and its inverse are the same tensor
            self.copied = True
            with torch.inference_mode(False), torch.no_grad():
                self._pairs = {scale.device: self._own((scale.clone(), inverse.clone()))}

    def _own(self, pair: Pair) -> Pair:
        for number in pair:
            tell_of_entries(number, self.enter)
        return pair

    def on(self, device: torch.device) -> Pair:
        """Return the scale and its inverse on `device`."""
        pair = self._pairs.get(device)
        if pair is None:
            scale, inverse = next(iter(self._pairs.values()))
            pair = on_device(scale, device), on_device(inverse, device)
            self._pairs[device] = self._own(pair) if self.copied else pair
        return pair

    def watch(self, results: Iterable[Any], weights: Sequence[Tensor], fed: Sequence[Tensor]) -> None:
        """Put hooks on the `results` of a graph, so that `enter` is called when a backward pass reaches one of them.

        `weights` and `fed` are the weights and the other inputs of the graph that require gradients. Does nothing if all backward passes
        use the same scale (it is not copied) and `entered` need not be called (`heard` is False).
        """
        if self.copied or self.heard:
            # Keep leaves, and tensors computed before this forward. Once an autograd node holds the scale (`is_held`), keep only leaves.
            # The autograd graph of another tensor may hold this object by the hooks below. If this object also held the tensor, no garbage
            # collector would see the cycle, as it runs through C++ nodes: the graph of each forward would stay, with all saved tensors.
            first = 0 if any(is_held(number) for pair in self._pairs.values() for number in pair) else self._first_node
            self.weights += [weight for weight in weights if existed(weight, first)]
            self._fed += [value.grad_fn for value in fed if value.grad_fn is not None and existed(value, first)]
            self._passed_over |= not all(existed(weight, first) for weight in weights)
            self._fed_later |= not all(existed(value, first) for value in fed)
            for result in results:
                if isinstance(result, Tensor) and result.grad_fn is not None:
                    hook_result(result, self._entered)

    @uncaptured
    def _entered(self, gradient: Tensor) -> None:
        self.enter()

    @uncaptured
    def enter(self) -> None:
        """Choose the scale or 1 when a backward first reaches this forward, and call `entered`. Later calls in this backward do nothing."""
        number = current_backward()
        if number < 0 or self.in_backward():
            return
        backward = _Backward()
        learning = [weight for weight in self.weights if weight.requires_grad]  # the user may have frozen weights since the forward
        kept, taken = _gives_gradient(learning or self._fed)
        self.entered(self, number, (kept or taken) and bool(self.weights) and not self.under_way)
        if self.copied:
            further = torch.is_grad_enabled()  # True with create_graph=True, that is, if the gradients will be differentiated themselves
            taken |= self._passed_over or (self._fed_later and not learning)
            self._set(not self.under_way and (kept or self.static + taken + (not further) > 1))
        # Assign `_backward` last. Until then each thread of this backward sets the scale itself, so no thread reads the scale too early.
        call_after_backward(backward)
        self._backward = weakref.ref(backward)

    def in_backward(self) -> bool:
        """True while a backward through the graphs of this forward runs."""
        backward = None if self._backward is None else self._backward()
        return backward is not None and not backward.over

    def _set(self, scaled: bool) -> None:
        if scaled == self._scaled:
            return
        for device, pair in self._pairs.items():
            for number, true in zip(pair, self._first, strict=True):
                value = number.data  # autograd must not notice this write, because a compiled graph may have saved the tensor for backward
                value.copy_(on_device(true, device)) if scaled else value.fill_(1)
        self._scaled = scaled


def _gives_gradient(tensors: Sequence[Tensor | Node]) -> tuple[bool, bool]:
    """Return whether the running backward stores a gradient of `tensors` in `.grad`, and whether torch.autograd.grad returns one.

    An autograd node in `tensors` stands for the tensor that it computed. If the backward continues to the leaves from which a tensor was
    computed, their gradients count. The search ends at the first stored gradient: then the second answer may miss returned gradients.
    """
    taken = False
    nodes = [get_gradient_edge(each).node if isinstance(each, Tensor) else each for each in reversed(tensors)]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        runs = _runs(node)
        if runs and hasattr(node, "variable"):  # the node adds a gradient to `.grad` of a leaf
            return True, taken
        further = [each for each, _ in node.next_functions if each is not None and _runs(each) is not False] if runs else []
        taken |= runs is not False and not further
        nodes += [each for each in further if each not in seen]
        seen.update(further)
    return False, taken


def _runs(node: Any) -> bool | None:
    """Return whether the running backward executes the autograd node. None if torch gives no answer: the node belongs to a leaf whose
    gradient torch.autograd.grad returns."""
    try:
        return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]
    except RuntimeError:  # during a backward, torch raises this only for a leaf whose gradient torch.autograd.grad returns
        return None
