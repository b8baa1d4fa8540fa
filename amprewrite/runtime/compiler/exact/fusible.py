"""Decide which calls of an ATen graph inductor computes bit for bit as PyTorch's own kernels do, if it keeps the casts.

1. Ops that only move or make values: views, copies, gathers, fills. Casts, too: each rounds once, to the nearest value.
2. Arithmetic that rounds each result once, as IEEE 754 requires: sums, products, quotients, comparisons, choices. Kernels for low
   formats compute in fp32 and round once, and so does inductor if it keeps the cast.
3. No other ops. The result of a sum over a dim depends on its order, and exponentials and square roots depend on the library. They stay
   calls of PyTorch's kernels.

A Python number among the arguments may be read in fp32 by a kernel and in the low format by inductor, or the other way round. The number
must be exact in both formats: see `_same_numbers`. If in doubt, a call is not fused, which is slower but correct.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch._inductor.lowering import lowerings

from amprewrite.tables.formats import LOW_DTYPES
from amprewrite.torch_internals.operators import OpOverload

aten, prims = torch.ops.aten, torch.ops.prims

MOVES = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.expand.default,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int,
    aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.alias.default, aten.detach.default,
    aten.clone.default, aten.cat.default, aten.constant_pad_nd.default, aten.copy_.default, aten.copy.default,
    aten.slice_scatter.default, aten.select_scatter.default, aten.embedding.default, aten.gather.default, aten.index.Tensor,
    aten.full.default, aten.scalar_tensor.default, aten.lift_fresh_copy.default, aten.repeat.default, aten.diagonal.default,
    prims.convert_element_type.default, prims.iota.default, prims.rev.default,
})  # fmt: skip
"""Calls that only move or make values. Inductor may fuse them for operands of every real dtype."""
ARITHMETIC = frozenset({
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default, aten.abs.default, aten.relu.default, aten.square.default,
    aten.logical_not.default, aten.logical_and.default, aten.logical_or.default, aten.bitwise_not.default, aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor,
})  # fmt: skip
"""Calls for which a kernel reads number arguments in fp32, even if the tensors are low."""
CHOICES = frozenset({
    aten.where.self, aten.maximum.default, aten.minimum.default, aten.clamp_min.default, aten.clamp_max.default,
    aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar,
    aten.gt.Scalar, aten.ge.Scalar, aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor,
})  # fmt: skip
"""Calls that select or compare values. Their number arguments are read in the format of the tensors."""
ON_CPU = frozenset({aten.div.Tensor, aten.reciprocal.default})
"""Arithmetic that is only exact on a CPU: on other devices the kernel or inductor approximates it."""
SPELLINGS = {
    aten.add.Scalar: aten.add.Tensor, aten.sub.Scalar: aten.sub.Tensor, aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}  # fmt: skip
"""For each call with a number in place of a tensor, the same call with a tensor."""


def is_fusible(node: torch.fx.Node) -> bool:
    """True if inductor's code for this call gives the same bits as PyTorch's kernel, or if inductor must lower the call itself."""
    if not isinstance(node.target, OpOverload):
        return True  # higher-order ops and Python arithmetic of sizes, which inductor must lower itself
    result = node.meta.get("val")
    if not _tensors(result):
        return True  # the result is a size, which no kernel computes
    if any(value.is_complex() or value.is_quantized for value in (*_tensors(result), *_operands(node))):
        return False
    target = SPELLINGS.get(node.target, node.target)
    if node.target not in lowerings:
        return False  # inductor cannot lower it, and would register a fallback to PyTorch's kernel, for the whole process
    if target in MOVES:
        return True
    if not isinstance(result, Tensor):
        return False
    on_cpu = target in ON_CPU and result.is_floating_point()
    if not (target in ARITHMETIC or target in CHOICES or (on_cpu and result.is_cpu)):
        return False
    return _same_formats(node, result) and _same_numbers(node, result, target in CHOICES)


def _same_formats(node: torch.fx.Node, result: Tensor) -> bool:
    """True if the call computes in one format, and all operands have this format or are widened to it exactly.

    A low 0-dim tensor among fp32 operands gives False, because kernels read it as a number, not as a tensor.
    """
    operands = [each for each in _operands(node) if each.dtype != torch.bool]
    if not operands:
        return True
    format_ = result.dtype if result.dtype != torch.bool else operands[0].dtype
    if result.is_floating_point() and any(not each.is_floating_point() for each in operands):
        return False
    return all(each.dtype == format_ or (each.dim() > 0 and format_ == torch.float32 and each.dtype in LOW_DTYPES) for each in operands)


def _same_numbers(node: torch.fx.Node, result: Tensor, chooses: bool) -> bool:
    """True if each number among the arguments is the same in fp32 and in the format of the tensors.

    Numbers must be exact in the low formats of the tensors. If no tensor is low and the call is in CHOICES (`chooses`), they must be exact
    in the formats of the tensors. False if a sum has a scale (`alpha`) other than 1, because only inductor rounds the product, and if a
    quotient has a rounding mode.
    """
    if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("rounding_mode") is not None:
        return False
    if len(node.args) > 2 and node.target in (aten.add.Scalar, aten.sub.Scalar) and node.args[2] != 1:
        return False
    formats = {each.dtype for each in (result, *_operands(node)) if each.is_floating_point()}
    narrow = formats & set(LOW_DTYPES) or (formats if chooses else set())
    return all(survives(number, dtype) for number in numbers_of(node) for dtype in narrow)


def numbers_of(node: torch.fx.Node) -> list[float]:
    """Return the Python numbers among the arguments of a call."""
    return [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, int | float)]


def survives(number: float, dtype: torch.dtype) -> bool:
    """True if `dtype` represents `number` exactly, or `number` is infinite or NaN."""
    if not math.isfinite(number):
        return True
    return torch.tensor(number, dtype=dtype, device="cpu").item() == number


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in `value`, which is a tensor, a tuple or list, or a value without tensors."""
    return [each for each in (value if isinstance(value, tuple | list) else (value,)) if isinstance(each, Tensor)]


def _operands(node: torch.fx.Node) -> list[Tensor]:
    return [value for source in node.all_input_nodes for value in _tensors(source.meta.get("val"))]
