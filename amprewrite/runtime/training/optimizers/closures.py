"""Steps that are given a closure: when it runs, what is checked, and how such a step is skipped.

1. An optimizer whose `step` calls the closure before all else finds it evaluated. Gradients are checked before its own code begins, and
   a step that overflows is skipped like one without a closure.
2. LBFGS evaluates again and again; it is put back to where it began if a later evaluation overflows.
3. Any other may read gradients or move weights before it calls (SAM, MeZO, extragradient): its closure runs when it is called. A
   gradient that overflows becomes zero there, so that no later forward sees NaN weights and keeps NaN statistics, and after the step
   weights, state and settings are put back. That takes a copy of the weights and of the state a step.

Which kind an optimizer is, the source of its `step` says; one whose source is unknown is of the third.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amprewrite.torch_internals.trees import tree_map_only

Look = Callable[[Optimizer], Tensor | None]
"""Gives a flag for the gradients of an optimizer; None without gradients."""
_HARMLESS = frozenset({"_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"})
"""Methods of torch's optimizers, by its versions, that are called before a closure, and change nothing."""


def params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters of all its groups."""
    return (p for group in optimizer.param_groups for p in group["params"])


class Evaluated:
    """A closure whose first evaluation is known, and whose later ones are checked.

    A later evaluation that overflows has no gradient to give: from then on there is none, and the loss is the first one, which
    ends any line search.  LBFGS is put back to its start afterwards, so its step is skipped like any other.
    """

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Any], look: Look) -> None:
        with torch.enable_grad():
            self.loss = closure()
        self.optimizer, self.closure, self.look = optimizer, closure, look
        self.found = look(optimizer)
        self.overflow = self.found is not None and self.found.item() > 0
        self.start: list[tuple[Tensor, Tensor, dict[str, Any] | None]] | None = None
        self._calls = 0
        if isinstance(optimizer, torch.optim.LBFGS):
            self.start = [
                (p, p.detach().clone(), copy.deepcopy(optimizer.state[p]) if p in optimizer.state else None)
                for p in params_of(optimizer)
            ]
            if self.overflow:
                self._drop_gradients()

    @property
    def idles(self) -> bool:
        """Whether the step is skipped before it begins: nothing of it must run."""
        return self.overflow and self.start is None

    def __call__(self) -> Any:
        self._calls += 1
        if self._calls == 1 or self.overflow:
            return self.loss
        with torch.enable_grad():
            loss = self.closure()
        found = self.look(self.optimizer)
        if found is None or found.item() == 0:
            return loss
        self.found, self.overflow = found, True
        self._drop_gradients()
        return self.loss

    def _drop_gradients(self) -> None:
        for p in params_of(self.optimizer):
            p.grad = None

    @torch.no_grad()
    def rewind(self) -> None:
        """Put LBFGS back to where it began."""
        for p, value, state in self.start or ():
            p.copy_(value)
            self.optimizer.state.pop(p, None)
            if state is not None:
                self.optimizer.state[p] = state


class Checked:
    """A closure that runs whenever the step calls it, in the step's own grad mode; its gradients, and those before it, are checked."""

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
        """Put the optimizer and its weights back to where they were; what is left of gradients is thrown away."""
        for start in self._start:
            start.restore()
        for p in params_of(self.optimizer):
            p.grad = None


class _Start:
    """Weights, state and settings of one optimizer before a step."""

    @torch.no_grad()
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.weights = [(p, p.detach().clone()) for p in params_of(optimizer)]
        own = {id(p) for p, _ in self.weights}
        keep = functools.partial(tree_map_only, Tensor, lambda t: t if id(t) in own else t.detach().clone())
        self.state = {key: keep(value) for key, value in optimizer.state.items()}
        self.groups = [{name: keep(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        self.settings = {
            name: keep(value)
            for name, value in optimizer.__dict__.items()
            if name not in ("state", "param_groups", "defaults") and isinstance(value, int | float | Tensor | list | tuple | dict)
            and not name.endswith("_hooks")
        }  # fmt: skip

    @torch.no_grad()
    def restore(self) -> None:
        for p, value in self.weights:
            p.copy_(value)
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)
        for group, kept in zip(self.optimizer.param_groups, self.groups, strict=False):
            for name in group.keys() - kept.keys() - {"params"}:
                del group[name]
            group.update(kept)
        self.optimizer.__dict__.update(self.settings)


def _with_inner(optimizer: Optimizer, seen: frozenset[int] = frozenset()) -> Iterator[Optimizer]:
    """An optimizer, and the optimizers that it wraps."""
    yield optimizer
    seen |= {id(optimizer)}
    for value in optimizer.__dict__.values():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, Optimizer) and id(each) not in seen:
                yield from _with_inner(each, seen)


# -- what the source of a step says -----------------------------------------------------------------
def guarded_closure(optimizer: Optimizer, closure: Callable[..., Any], look: Look) -> Evaluated | Checked:
    """The closure that the step gets in place of `closure`."""
    first = isinstance(optimizer, torch.optim.LBFGS) or calls_closure_first(inspect.unwrap(type(optimizer).step))
    return (Evaluated if first else Checked)(optimizer, closure, look)


@functools.lru_cache(maxsize=256)
def calls_closure_first(step: Callable[..., Any]) -> bool:
    """Whether `step(self, closure)` calls the closure once, before anything that has an effect or reads what the closure changes."""
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
    """Whether the closure is read other than by a call or by a question whether there is one."""
    fine = {id(each.func) for each in ast.walk(function) if isinstance(each, ast.Call)}
    fine |= {id(test) for each in ast.walk(function) for test in _questions(each)}
    return any(isinstance(each, ast.Name) and each.id == name and id(each) not in fine for each in ast.walk(function))


def _questions(node: ast.AST) -> Iterable[ast.AST]:
    if isinstance(node, ast.Compare):
        return (node.left,)
    return (node.test,) if isinstance(node, ast.If | ast.IfExp) else ()


def _reaches_first(body: list[ast.stmt], name: str) -> bool:
    """Whether the first statement with an effect calls the closure."""
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


__all__ = ["Checked", "Evaluated", "calls_closure_first", "guarded_closure", "params_of"]
