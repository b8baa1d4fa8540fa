"""Run an edited graph op by op the first time. An op that refuses low operands gets fp32 operands instead, and the refusal is recorded.

Fake tensors have a kernel for every op and dtype. So only a real run shows that a kernel is missing: a custom op may take fp32 operands
only, and a device or a version of torch may lack a kernel that the op table expects.

1. The first run of a graph runs node by node. If an op with low operands raises an error, it is called again with the same operands in
   fp32, and the result is cast to the planned format. An op that writes to memory is not called again. No earlier op runs twice.
2. The op and its error are recorded in `refused`. The runtime then plans the graph again, with this op in fp32.
3. Later runs use the graph's own code. But a graph with a refusal keeps running op by op, because an activation checkpoint that recomputes
   the first call needs the same ops.

The body graph of an activation checkpoint may read and write tensors that the model holds: weights, statistics, counters. Dynamo makes all
these tensors operands of the checkpoint. PyTorch saves operands, and refuses to recompute if an operand was written since. It does not save
variables that a body closes over: the recomputation reads these variables again. So `checkpoint_with_state` passes the tensors of the model
in a way that PyTorch treats like closed-over variables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from amprewrite.graphs.fx.node_facts import example_value, is_checkpoint, is_opaque, tensors, written, written_unsaid
from amprewrite.graphs.fx.uncaptured import closed_if_raised
from amprewrite.tables.formats import LOW_DTYPES
from amprewrite.tables.ops.op_lists import op_name
from amprewrite.torch_internals.dispatch import is_any_autocast_enabled
from amprewrite.torch_internals.graph_modules import force_recompile
from amprewrite.torch_internals.operators import OpOverload, OpOverloadPacket
from amprewrite.torch_internals.trees import tree_leaves, tree_map_only

Refusals = dict[str, str]
"""Error messages of the ops that refused low operands, by the name of the op."""

_REFUSALS = (RuntimeError, TypeError, ValueError, AssertionError)
"""Classes of the errors that ops raise to refuse a dtype.

Exceptions of other classes may control execution: a checkpoint raises such an exception to end its recomputation.
"""


class FirstRun:
    """Callable that runs `module` op by op at the first call, and calls `later` afterwards.

    The ops that refuse low operands are added to `refused`. While `refused` is not empty, every call runs op by op.
    """

    def __init__(self, module: torch.fx.GraphModule, later: Callable[..., Any], refused: Refusals) -> None:
        self.module, self.later, self.refused = module, later, refused
        self.first = True

    def __call__(self, *inputs: Any) -> Any:
        if not (self.first or self.refused):
            return self.later(*inputs)
        self.first = False
        return _Careful(self.module, self.refused).run(*inputs, enable_io_processing=False)


class _Careful(torch.fx.Interpreter):
    """Interpreter that repeats an op with fp32 operands if the op refused low operands."""

    def __init__(self, module: torch.fx.GraphModule, refused: Refusals) -> None:
        super().__init__(module)
        self.refused = refused
        self.extra_traceback = False  # the interpreter must not add its own text to errors that the model raises

    def run_node(self, n: torch.fx.Node) -> Any:
        if not n.op.startswith("call"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        run = getattr(self, n.op)
        try:
            return run(n.target, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except _REFUSALS as error:
            low = any(isinstance(each, Tensor) and each.dtype in LOW_DTYPES for each in tree_leaves((args, kwargs)))
            if not low or is_any_autocast_enabled() or _runs_more(n) or written(n) or written_unsaid(n):
                raise  # no operand is low; or the model's own autocast region sets the dtypes; or the op may have had a side effect
            try:
                result = run(n.target, *tree_map_only(Tensor, lambda t: t.float() if t.dtype in LOW_DTYPES else t, (args, kwargs)))
            except _REFUSALS:
                raise error from None  # the op also fails in fp32, so the low dtype is not the cause
            self.refused[op_name(n.target)] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            planned = iter(tensors(example_value(n)))
            return tree_map_only(Tensor, lambda t: t.to(next(planned).dtype), result)


def _runs_more(node: torch.fx.Node) -> bool:
    """True if `node` may run several ops. If one of them raises an error, earlier ones have run already, and must not run again."""
    return node.op == "call_module" or is_opaque(node) or isinstance(node.target, FunctionType)


def runs_op_by_op(module: torch.fx.GraphModule, later: Callable[..., Any], refused: Refusals) -> FirstRun:
    """Return a callable that runs `module` op by op at the first call, and calls `later` afterwards.

    Ops that refuse low operands are added to `refused`, with their errors. The body graphs of checkpoints in `module` get a callable of
    this kind as their `forward`.
    """
    for body in _bodies(module):
        force_recompile(body)
        body.forward = runs_op_by_op(body, type(body).forward.__get__(body), refused)
    return FirstRun(module, later, refused)


def has_custom_op(module: torch.fx.GraphModule) -> bool:
    """True if a graph, or the body of a checkpoint in it, passes low operands to an op of a library other than PyTorch.

    A compiler calls the kernel of a custom op without checking that the kernel takes low operands.
    """
    ops = (node for node in module.graph.nodes if isinstance(node.target, OpOverload | OpOverloadPacket) and "::" in op_name(node.target))
    return any(_is_low(each) for op in ops for each in op.all_input_nodes) or any(map(has_custom_op, _bodies(module)))


def _bodies(module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """Return the body graphs of the checkpoints in the graph of `module`."""
    calls = (node for node in module.graph.nodes if is_checkpoint(node) or node.target in (checkpoint, checkpoint_with_state))
    return [getattr(module, str(each.target)) for node in calls for each in node.all_input_nodes[:1]]


def _is_low(node: torch.fx.Node) -> bool:
    return any(t.dtype in LOW_DTYPES for t in tensors(example_value(node)))


def checkpoint_with_state(
    body: Callable[..., Any], *operands: Any, state: tuple[int, ...], use_reentrant: bool, enters: bool = False, **options: Any
) -> Any:
    """Return `checkpoint(body, *operands)`. The model holds the operands at the positions `state` (ascending), so they are not saved.

    These operands are passed in one tuple, because PyTorch saves no tensors in a tuple. It still saves the random states of their devices.
    A reentrant checkpoint passes no gradients to tensors in a tuple. So with `use_reentrant`, operands that require gradients are passed
    directly, and saved.

    `enters` is True if the body enters regions, such as `torch.no_grad()`. These regions are closed if an error ends the body. PyTorch
    itself raises such an error in a recomputation once it has all values that the backward needs.
    """
    held = tuple((place, operands[place]) for place in state if not (use_reentrant and operands[place].requires_grad))
    apart = {place for place, _ in held}

    def run(held: tuple[tuple[int, Any], ...], *others: Any) -> Any:
        given = list(others)
        for place, tensor in held:  # positions ascend, so each insertion puts a tensor at its original position
            given.insert(place, tensor)
        with closed_if_raised() if enters else contextlib.nullcontext():
            return body(*given)

    others = (operand for place, operand in enumerate(operands) if place not in apart)
    return checkpoint(run, held, *others, use_reentrant=use_reentrant, **options)
