"""The first run of an edited graph, op by op: an op that refuses low operands gets them in fp32, and is reported.

Fake tensors have a kernel for every op and dtype. A missing kernel of a device shows only in a run: a custom op may take fp32 alone, and a
device or a version of torch may lack a kernel that the op table expects. So

1. the first run of a graph runs node by node. If an op with low operands raises, writes nothing, and runs on the same operands in fp32, its
   result is cast to the planned format. No op before it runs twice;
2. the op and its error are kept in `refused`, and the owner of the graph plans it anew;
3. later runs use the graph's own code. A graph with an op that refused keeps running op by op: a recomputation of this call needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from amprewrite.graphs.fx.node_facts import example_value, is_checkpoint, is_opaque, tensors, written, written_unsaid
from amprewrite.graphs.fx.run.checkpoint_state import checkpoint_with_state
from amprewrite.tables.formats import LOW_DTYPES
from amprewrite.tables.ops.op_lists import op_name
from amprewrite.torch_internals.graph_modules import force_recompile
from amprewrite.torch_internals.operators import OpOverload, OpOverloadPacket
from amprewrite.torch_internals.trees import tree_leaves, tree_map_only

Refusals = dict[str, str]
"""Errors of ops that refused low operands, by the name of the op."""

_REFUSALS = (RuntimeError, TypeError, ValueError, AssertionError)
"""Classes of errors by which ops refuse a dtype. Other classes control what runs: a checkpoint ends its recomputation by one."""


class FirstRun:
    """Runs `later`, after a first run of `module` that finds the ops that refuse low operands."""

    def __init__(self, module: torch.fx.GraphModule, later: Callable[..., Any], refused: Refusals) -> None:
        self.module, self.later, self.refused = module, later, refused
        self.first = True

    def __call__(self, *inputs: Any) -> Any:
        if not (self.first or self.refused):
            return self.later(*inputs)
        self.first = False
        return _Careful(self.module, self.refused).run(*inputs, enable_io_processing=False)


class _Careful(torch.fx.Interpreter):
    """An interpreter that repeats an op in fp32 if it refused low operands."""

    def __init__(self, module: torch.fx.GraphModule, refused: Refusals) -> None:
        super().__init__(module)
        self.refused = refused
        self.extra_traceback = False  # an error of the model's own is raised as its code would raise it

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
            if not low or _runs_more(n) or written(n) or written_unsaid(n):
                raise
            try:
                result = run(n.target, *_widened((args, kwargs)))
            except _REFUSALS:
                raise error from None  # it refuses something else
            self.refused[op_name(n.target)] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            planned = iter(tensors(example_value(n)))
            return tree_map_only(Tensor, lambda t: t.to(next(planned).dtype), result)


def _runs_more(node: torch.fx.Node) -> bool:
    """True if the node runs more than one op: some may have run already and must not run again."""
    return node.op == "call_module" or is_opaque(node) or isinstance(node.target, FunctionType)


def _widened(values: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.float() if t.dtype in LOW_DTYPES else t, values)


def runs_op_by_op(module: torch.fx.GraphModule, later: Callable[..., Any], refused: Refusals) -> FirstRun:
    """A first run of `module`, and of the bodies of its checkpoints."""
    for body in _bodies(module):
        force_recompile(body)
        body.forward = runs_op_by_op(body, type(body).forward.__get__(body), refused)
    return FirstRun(module, later, refused)


def has_custom_op(module: torch.fx.GraphModule) -> bool:
    """True if a graph passes low operands to an op of a library other than PyTorch: a compiler calls its kernel without a check."""
    own = any(_is_custom(node) and any(map(_is_low, node.all_input_nodes)) for node in module.graph.nodes)
    return own or any(map(has_custom_op, _bodies(module)))


def _bodies(module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """The bodies of the checkpoints in a graph."""
    calls = (node for node in module.graph.nodes if is_checkpoint(node) or node.target in (checkpoint, checkpoint_with_state))
    return [getattr(module, str(each.target)) for node in calls for each in node.all_input_nodes[:1]]


def _is_custom(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload | OpOverloadPacket) and "::" in op_name(node.target)


def _is_low(node: torch.fx.Node) -> bool:
    return any(t.dtype in LOW_DTYPES for t in tensors(example_value(node)))


__all__ = ["FirstRun", "Refusals", "has_custom_op", "runs_op_by_op"]
