"""Without a compiler, compute the cross entropy of many low-precision logits in parts, to save memory for fp32 logits and gradients.

A loss qualifies if it reads an fp32 copy of bf16 or fp16 logits, directly or through views, if the logits have one row for each target, and
if it has no class weights and no label smoothing. In fp16 a loss stays whole if the graph also returns its logits, because the loss scale
is applied between logits and loss. With a compiler the pass does not run, because the compiler fuses the loss itself.

The fp32 copy of the logits, the log-softmax and the fp32 gradients of both take four times the memory of the low logits and their low
gradient. So `cross_entropy_of_low` computes the log-softmax for some rows at a time, does not save it, and computes it again in backward.
Rows do not depend on each other, and PyTorch's own kernels compute each part: on a CPU the results are equal, bit for bit, to the results
of a computation of all rows at once.

    before   wide = to(logits, float32)                            after   loss = cross_entropy_of_low(logits, labels, -100, "mean")
             loss = cross_entropy(wide, labels)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch import Tensor

from amprewrite.graphs.fx.captured import EditedGraph, Target
from amprewrite.graphs.fx.node_facts import example_value, hint, memory_of, named_arguments, transformed_nodes, written_memory
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.ir.pass_base import Pass
from amprewrite.passes.lower.suit_compiler import widens
from amprewrite.tables.ops.op_lists import Trait, op_name, ops_with
from amprewrite.torch_internals.dispatch import in_forward_mode

VIEWS = ops_with(Trait.KEEPS_ORDER)
"""Ops that may be between the fp32 copy of the logits and the loss."""
_PLAIN: dict[str, Any] = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}
"""Arguments of a loss that must have these values or be absent."""


class SplitLosses(Pass[Target, EditedGraph]):
    needs = ("eager",)

    def __call__(self, target: Target, edited: EditedGraph) -> None:
        if not target.training or not _large(edited.module.graph):
            return
        edited.make_own()
        for node in _large(edited.module.graph):
            split_loss(edited.module, node)
        edited.module.recompile()


def _large(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Return the cross_entropy calls to split: with 2-dim logits of at least FROM_BYTES in fp32, and outside of torch.func transforms."""
    losses = graph.find_nodes(op="call_function", target=torch.nn.functional.cross_entropy)
    apart = transformed_nodes(graph) if losses else set()
    return [node for node in losses if node not in apart and _qualifies(named_arguments(node))]


def _qualifies(given: dict[str, Any]) -> bool:
    """True if a loss has int64 targets, 2-dim logits whose fp32 copy would be large, no class weights and no label smoothing."""
    if any(given.get(name) not in (plain, None) for name, plain in _PLAIN.items()):
        return False
    logits, target = (example_value(each) if isinstance(each, torch.fx.Node) else None for each in (given["input"], given["target"]))
    if not isinstance(logits, torch.Tensor) or not isinstance(target, torch.Tensor) or logits.dim() != 2 or target.dtype != torch.int64:
        return False
    return math.prod(map(hint, logits.shape)) * 4 >= FROM_BYTES


def split_loss(module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    """Let a loss read low-precision logits in parts, instead of their fp32 copy.

    The loss stays unchanged if there is no such copy, or if the graph writes to the copy or to the original logits.
    """
    given = named_arguments(node)
    chain = [given["input"]]
    while chain[-1].op.startswith("call") and op_name(chain[-1].target) in VIEWS:
        chain.append(chain[-1].args[0])
    written = written_memory(module.graph)
    if not widens(chain[-1]) or not all(written.isdisjoint(memory_of(each)) for each in (*chain, chain[-1].args[0])):
        return
    low = {chain[-1]: chain[-1].args[0]}
    with module.graph.inserting_before(node):
        for view in reversed(chain[:-1]):
            low[view] = module.graph.node_copy(view, lambda each: low.get(each, each))
            low[view].target = "reshape" if view.target == "view" else view.target  # `view` fails on rows that are padded in memory
    own = {node, *chain}
    wide = given["input"] if any(user not in own for each in chain for user in each.users) else None
    chosen = [given["ignore_index"], given["reduction"]]
    kept: list[Any] = [default if value is None else value for value, default in zip(chosen, (-100, "mean"), strict=True)]
    node.target, node.args, node.kwargs = cross_entropy_of_low, (low[given["input"]], given["target"], *kept, wide), {}
    for each in chain if wide is None else ():
        module.graph.erase_node(each)


FROM_BYTES = 1 << 27
"""Least size of the fp32 copy of the logits, in bytes, for which the saved memory is worth a few more kernel launches."""
PARTS = 4
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_aten = torch.ops.aten
_IGNORED = -100


def cross_entropy_of_low(
    logits: Tensor, target: Tensor, ignore_index: int = _IGNORED, reduction: str = "mean", wide: Tensor | None = None
) -> Tensor:
    """Return `cross_entropy(logits.float(), target, ...)` of bf16 or fp16 `logits`, with PyTorch's options. Large logits are read in parts.

    The parts need `logits` of shape (rows, classes) and `target` of shape (rows,). Other shapes, small logits and forward-mode AD are left
    to PyTorch's function. `wide` is the fp32 copy of the logits that the graph makes for other readers, if any. The forward pass reads it.
    """
    parts = logits.numel() * 4 >= FROM_BYTES and target.dim() == 1 and logits.dim() == 2
    if not parts or in_forward_mode():
        return torch.nn.functional.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction=reduction)
    loss: Tensor = _InParts.apply(logits, target, ignore_index, reduction, logits.detach() if wide is None else wide.detach())
    return loss


def _parts(rows: int) -> Iterator[slice]:
    size = -(-rows // PARTS)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


class _InParts(torch.autograd.Function):
    """Autograd node that computes cross entropy for a part of the rows at a time.

    scale_ops.py gives the reason for the old style of `forward(ctx, ...)`.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, reduction: str, read: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # if nothing reads the loss, keep its gradient None, not zeros (see `scale_ops._Cross`)
        ignored = target == ignore_index
        chosen = target.masked_fill(ignored, 0).unsqueeze(1)
        picked = [torch.log_softmax(read[part], 1, dtype=torch.float32).gather(1, chosen[part]) for part in _parts(len(read))]
        # `picked` has one class only, the target's, so each target is class 0 here. nll_loss adds up these rows in the same order as rows
        # with all classes, so the mean is the same bit for bit.
        only = torch.zeros_like(target).masked_fill(ignored, _IGNORED)
        loss, weight = _aten.nll_loss_forward(torch.cat(picked), only, None, REDUCTIONS[reduction], _IGNORED)
        ctx.save_for_backward(logits, target, weight)
        ctx.ignore_index, ctx.reduction = ignore_index, reduction
        return loss

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:  # type: ignore[override]
        if gradient is None:
            return None, None, None, None, None
        logits, target, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: this gradient must be differentiable, so PyTorch's function computes it
            loss = torch.nn.functional.cross_entropy(logits.float(), target, ignore_index=ctx.ignore_index, reduction=ctx.reduction)
            return (*torch.autograd.grad(loss, logits, gradient, create_graph=True), None, None, None, None)
        left = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for part in _parts(len(logits)):
            given = gradient[part] if ctx.reduction == "none" else gradient
            left[part] = _gradient(logits[part], target[part], given, ctx.reduction, ctx.ignore_index, weight)
        return left, None, None, None, None


def _gradient(logits: Tensor, target: Tensor, given: Tensor, reduction: str, ignore_index: int, weight: Tensor) -> Tensor:
    """Return the fp32 gradient of `logits`, which are some rows of the logits of a loss. `given` is the gradient of the loss.

    `weight` is the number by which a mean divides, as the forward computed it: the targets that are not ignored, in all rows. This is a
    separate function so that its intermediate tensors are freed before the next rows.
    """
    logs = torch.log_softmax(logits, 1, dtype=torch.float32)
    inner = _aten.nll_loss_backward(given, logs, target, None, REDUCTIONS[reduction], ignore_index, weight)
    found: Tensor = _aten._log_softmax_backward_data(inner, logs, 1, torch.float32)
    return found
