"""Handle optimizer steps with a closure: decide when the closure runs, check its gradients, and skip the step if they overflow.

There are two kinds of optimizers:

1. `step` calls the closure before it does anything else. Then the closure runs before the step begins, its gradients are checked, and the
   step gets the result of the closure. A step that overflows is skipped like a step without a closure.
2. `step` may read gradients or change weights before it calls the closure (SAM, MeZO, extragradient), or call it several times (LBFGS). So
   the closure runs when the step calls it. If gradients overflow, all are set to zero. Otherwise a later forward of this step would run on
   NaN weights, and leave NaN in running statistics. Zeros also end a line search. After the step, its changes are undone: the optimizer's
   weights, state and settings are restored from copies that are made before each step.

The kind is found in the source code of `step`. An optimizer without source code is of the second kind.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amprewrite.runtime.training.nonfinite import params_of

Look = Callable[[Optimizer], Tensor | None]
"""A function that returns an overflow flag for the gradients of an optimizer: above 0 for an overflow; None without gradients."""
_HARMLESS = frozenset({"_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"})
"""Methods of torch's optimizers that `step` calls before the closure and that change nothing. The name depends on the version of torch."""


class Evaluated:
    """Wrapper that runs a closure once, before the step. When the step calls the wrapper, it only returns the loss of that run."""

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Any], look: Look) -> None:
        with torch.enable_grad():
            self.loss = closure()
        self.found = look(optimizer)
        self.overflow = self.idles = self.found is not None and self.found.item() > 0
        """`overflow`: the gradients overflowed. `idles`: the whole step must be skipped. Here both are equal. `Checked` lets steps run."""

    def __call__(self) -> Any:
        return self.loss

    def rewind(self) -> None:
        """Do nothing: there is no step to undo, because a step whose gradients overflowed was skipped as a whole."""


class Checked:
    """Wrapper that runs a closure each time the step calls the wrapper, in the step's grad mode.

    Gradients are checked before the step and after each call. If they overflow, they are set to zero.
    """

    idles = False

    def __init__(self, optimizer: Optimizer, closure: Callable[..., Any], look: Look) -> None:
        self.optimizer, self.closure, self.look = optimizer, closure, look
        self.found: Tensor | None = None
        self.overflow = False
        self._start = [_Start(each) for each in _with_inner(optimizer)]
        self._check()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss = self.closure(*args, **kwargs)
        self._check()
        return loss

    def _check(self) -> None:
        found = self.look(self.optimizer)
        if found is None:
            return
        overflow = found.item() > 0
        if overflow or self.found is None:
            self.found = found
        if overflow:
            self.overflow = True
            for p in params_of(self.optimizer):
                if p.grad is not None:
                    p.grad = torch.zeros_like(p.grad)

    def rewind(self) -> None:
        """Undo the step: restore weights, state and settings of the optimizer and of optimizers inside it. Set all gradients to zero."""
        for start in self._start:
            start.restore()
        for p in params_of(self.optimizer):
            if p.grad is not None:
                p.grad = torch.zeros_like(p.grad)


class Idle:
    """Makes the next step harmless: sets the gradients to zero before it. After it, `rewind` undoes the step and restores the gradients.

    The gradients are zero, not None, because many optimizers take for granted that some parameter has a gradient.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._start = [_Start(each) for each in _with_inner(optimizer)]
        self._gradients = [(p, p.grad) for p in params_of(optimizer) if p.grad is not None]
        for p, gradient in self._gradients:
            p.grad = torch.zeros_like(gradient)

    def rewind(self) -> None:
        """Undo the step, and give the parameters back the gradients that they had before it."""
        for start in self._start:
            start.restore()
        for p, gradient in self._gradients:
            p.grad = gradient


class _Start:
    """Copies of the weights, state and attributes of one optimizer before a step.

    `restore` writes the copies back in place, because other attributes and other objects may hold the same tensors and containers.
    """

    @torch.no_grad()
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.attributes = optimizer, dict(optimizer.__dict__)
        self.kept: dict[int, tuple[Any, Any]] = {}
        """For each tensor and container, by its id: (the tensor or container itself, a copy of it)."""
        held = [value for name, value in self.attributes.items() if not name.endswith("_hooks")]
        for each in (params_of(optimizer), optimizer.state, optimizer.param_groups, held):
            self._keep(each)

    def _keep(self, value: Any) -> None:
        if id(value) in self.kept:
            return
        if isinstance(value, Tensor):
            self.kept[id(value)] = value, value.detach().clone()
        elif isinstance(value, MutableMapping | list | deque | set):
            copied = dict(value) if isinstance(value, MutableMapping) else list(value)
            self.kept[id(value)] = value, copied
            for each in copied.values() if isinstance(copied, dict) else copied:
                self._keep(each)
        elif isinstance(value, tuple):
            for each in value:
                self._keep(each)

    @torch.no_grad()
    def restore(self) -> None:
        hooks = self.attributes.get("_optimizer_step_pre_hooks", ())
        if len(hooks) < 2:  # no pre-hook but ours: delete attributes that the step added, computed from zero gradients or an infinite loss
            self.optimizer.__dict__.clear()  # with other pre-hooks all attributes stay: a pre-hook may have added one for a post-hook
        self.optimizer.__dict__.update(self.attributes)
        for value, copied in self.kept.values():
            if isinstance(value, Tensor):
                value.copy_(copied)
            else:
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(copied)


def _with_inner(optimizer: Optimizer, seen: frozenset[int] = frozenset()) -> Iterator[Optimizer]:
    """Yield an optimizer and, if it is a wrapper, all optimizers in its attributes."""
    yield optimizer
    seen |= {id(optimizer)}
    for value in optimizer.__dict__.values():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, Optimizer) and id(each) not in seen:
                yield from _with_inner(each, seen)


# -- which of the two kinds (see the top of the file) an optimizer is, according to the source code of its `step` --
def guarded_closure(optimizer: Optimizer, closure: Callable[..., Any], look: Look) -> Evaluated | Checked:
    """Wrap the `closure` of an optimizer step so that the gradients it computes are checked. `look` returns their overflow flag.

    If the step calls its closure before it does anything else, return an `Evaluated`, which runs the closure now. Otherwise return a
    `Checked`, which runs the closure when the step calls it.
    """
    first = calls_closure_first(inspect.unwrap(type(optimizer).step))
    return (Evaluated if first else Checked)(optimizer, closure, look)


@functools.lru_cache(maxsize=256)
def calls_closure_first(step: Callable[..., Any]) -> bool:
    """True if the source of `step(self, closure)` has a single call of the closure, before any other code with an effect.

    False if the source is not available, or if the closure is passed on to other code.
    """
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(step))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) < 2:
        return False
    name = function.args.args[1].arg
    calls = [each for each in ast.walk(function) if isinstance(each, ast.Call) and _is_name(each.func, name)]
    return len(calls) == 1 and not _passed_on(function, name) and _reaches_first(function.body, name)


def _passed_on(function: ast.FunctionDef, name: str) -> bool:
    """True if the function uses its closure, the variable `name`, in any way except to call it or to test it in a condition."""
    fine = {id(each.func) for each in ast.walk(function) if isinstance(each, ast.Call)}
    fine |= {id(test) for each in ast.walk(function) for test in _questions(each)}
    return any(isinstance(each, ast.Name) and each.id == name and id(each) not in fine for each in ast.walk(function))


def _questions(node: ast.AST) -> Iterable[ast.AST]:
    if isinstance(node, ast.Compare):
        return (node.left,)
    return (node.test,) if isinstance(node, ast.If | ast.IfExp) else ()


def _reaches_first(body: list[ast.stmt], name: str) -> bool:
    """True if the first statement with an effect in `body` calls the closure, the variable `name`."""
    for statement in body:
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return) and statement.value is not None:
            value: ast.expr = statement.value
            if isinstance(value, ast.IfExp):
                value = value.body if _calls(value.body, name) else value.orelse
            if _calls(value, name):
                return True
            if isinstance(value, ast.Constant) or (isinstance(value, ast.Call) and getattr(value.func, "attr", "") in _HARMLESS):
                continue
            return False
        if isinstance(statement, ast.If) and any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(statement.test)):
            return _reaches_first(statement.body, name)
        if isinstance(statement, ast.With) and all(_is_grad_mode(item.context_expr) for item in statement.items):
            return _reaches_first(statement.body, name)
        return False
    return False


def _calls(value: ast.expr, name: str) -> bool:
    if isinstance(value, ast.Call) and _is_name(value.func, "float") and len(value.args) == 1:
        value = value.args[0]
    return isinstance(value, ast.Call) and _is_name(value.func, name) and not value.args and not value.keywords


def _is_grad_mode(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and getattr(value.func, "attr", "") in ("enable_grad", "no_grad", "set_grad_enabled")


def _is_name(value: ast.expr, name: str) -> bool:
    return isinstance(value, ast.Name) and value.id == name
