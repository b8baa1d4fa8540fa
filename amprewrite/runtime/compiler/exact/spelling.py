"""Decide which calls of an ATen graph inductor may fuse without changing a bit of a result, and replace some other calls by fusible ones.

Inductor's code gives the same bits as PyTorch's own kernels for these calls, if it keeps the casts:

1. Ops that only move or make values: views, copies, gathers, fills. Also casts: each rounds once, to the nearest value.
2. Arithmetic that rounds each result once, as IEEE 754 requires: sums, products, quotients, comparisons, choices. Kernels for low
   formats compute in fp32 and round once, and so does inductor if it keeps the cast.
3. No other ops. The result of a sum over a dim depends on the order of its terms, and exponentials and square roots depend on the
   library. These ops stay calls of PyTorch's kernels.

A Python number among the arguments may be read in fp32 by a kernel and in the low format by inductor, or the other way round. The number
must be exact in both formats (see `_same_numbers`). If this is not certain, the call is not fused, which is slower but correct.

Other calls are replaced by equivalent calls that inductor can fuse, without changing a bit of a result:

1. Calls that only move or make values are decomposed by inductor's own decompositions (`DECOMPOSED`).
2. A square becomes a product, and a first power becomes a copy. On a CPU a cube in fp32 becomes two products. A cube in another format is
   not replaced: in fp16 its kernel rounds once, and two products would round twice.
3. A product or quotient in a low format with a number that the format does not represent exactly becomes a cast to fp32, the call in
   fp32, and a cast back. The kernel does the same and rounds once, but inductor would round the number first.
4. On a CPU, a number in a sum or difference is replaced by its value rounded to the low format, because the kernel rounds it first.
5. Dropout on a CPU becomes one product with a mask that holds 0 or 1 / (1 - p) in the format of the input, as in eager code. The traced
   graph has another call, which multiplies by a mask and by 1 / (1 - p), and rounds twice. The same holds for the backward.

    before   mul(x_bf16, 0.1)                                    add(x_bf16, 0.1)
    after    convert(mul(convert(x_bf16, fp32), 0.1), bf16)      add(x_bf16, 0.10009765625)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
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
"""Maps each op for a tensor and a number to the same op for two tensors."""


def is_fusible(node: torch.fx.Node) -> bool:
    """True if inductor's code for a call gives the same bits as PyTorch's kernel, or if the call has no kernel, as arithmetic of sizes."""
    if not isinstance(node.target, OpOverload):
        return True  # no kernel exists: inductor itself must lower higher-order ops and Python arithmetic of sizes
    result = node.meta.get("val")
    if not _tensors(result):
        return True  # the result is a size, which no kernel computes
    if any(value.is_complex() or value.is_quantized for value in (*_tensors(result), *_operands(node))):
        return False
    target = SPELLINGS.get(node.target, node.target)
    if node.target not in lowerings:
        return False  # inductor has no lowering for the call, and would register a fallback to the kernel for the whole process
    if target in MOVES:
        return True
    if not isinstance(result, Tensor):
        return False
    on_cpu = target in ON_CPU and result.is_floating_point()
    if not (target in ARITHMETIC or target in CHOICES or (on_cpu and result.is_cpu)):
        return False
    return _same_formats(node, result) and _same_numbers(node, result, target in CHOICES)


def _same_formats(node: torch.fx.Node, result: Tensor) -> bool:
    """True if the call computes in one format, and each operand has this format or is widened to it exactly, as bf16 to fp32.

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
    """True if each Python number among the arguments of a call has the same value in inductor's code and in PyTorch's kernel.

    If a tensor is low (bf16, fp16), inductor or the kernel may round the numbers to its format, so they must be exact in it. If no tensor
    is low, numbers are rounded only if the call selects or compares values (`chooses`): they must be exact in the format of its tensors.
    False for a quotient with a rounding mode, and for a sum whose `alpha` is not 1: only inductor rounds the product with `alpha`.
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


DECOMPOSED = (
    aten.t.default, aten.transpose.int, aten._to_copy.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.zeros.default, aten.ones.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.fill.Scalar, aten.stack.default,
    aten.unsafe_split.Tensor, aten.index_select.default, aten.flip.default, aten.roll.default, aten.tril.default, aten.triu.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.clamp.default, aten.rsub.Scalar,
)  # fmt: skip
"""Calls that inductor decomposes into calls that only move or make values, or into calls that `is_fusible` can judge."""
_WIDE = (aten.mul.Tensor, aten.div.Tensor)
_ROUNDED = (aten.add.Tensor, aten.sub.Tensor)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions for inductor: its own for DECOMPOSED, ours for dropout and for backwards of dropout, ReLU and slices."""
    table = select_decomp_table()
    own: dict[Any, Callable[..., Any]] = {
        aten.slice_backward.default: _slice_backward,
        aten.native_dropout.default: _dropout,
        aten.native_dropout_backward.default: _dropout_backward,
        aten.threshold_backward.default: _threshold_backward,
    }
    return {call: table[call] for call in DECOMPOSED if call in table} | own


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Decompose dropout on a CPU into the ops that eager code runs. On other devices, if `train` is False, or if `p` is 0 or 1, return
    NotImplemented: then the traced call stays."""
    if not x.is_cpu or train is False or not 0 < p < 1:
        return NotImplemented  # type: ignore[no-any-return]
    mask = aten.bernoulli.p(torch.empty_like(x), 1 - p)
    return x * (mask / (1 - p)), mask != 0


def _dropout_backward(gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Decompose the backward of dropout on a CPU as eager code computes it. Return NotImplemented on other devices, and if `scale` is 0."""
    if not gradient.is_cpu or not scale:
        return NotImplemented  # type: ignore[no-any-return]
    return gradient * (mask.to(gradient.dtype) / (1 / scale))


def _threshold_backward(gradient: Tensor, x: Tensor, threshold: float) -> Tensor:
    """Decompose the backward of ReLU (threshold 0). Return NotImplemented for another threshold: a comparison with a bf16 `x`
    may round the threshold to bf16, but the kernel does not."""
    return NotImplemented if threshold else gradient.masked_fill(x <= 0, 0)


def _slice_backward(gradient: Tensor, sizes: Sequence[Any], dim: int, start: Any, end: Any, step: Any) -> Tensor:
    """Decompose the backward of a slice: pad the gradient with zeros, by one call that inductor fuses. For symbolic sizes, and for a step
    other than 1, return NotImplemented: then PyTorch's kernel runs."""
    dim %= len(sizes)
    size, length = sizes[dim], gradient.shape[dim]
    if step != 1 or not all(type(each) is int for each in (size, length, start)):
        return NotImplemented  # type: ignore[no-any-return]
    before = min(max(start + size if start < 0 else start, 0), size)
    around = [0, 0] * (len(sizes) - 1 - dim) + [before, size - before - length]
    return aten.constant_pad_nd.default(gradient, around, 0)  # type: ignore[no-any-return]


def spell(graph: torch.fx.Graph) -> None:
    """Replace calls of `graph`, in place, by equivalent calls that inductor can fuse: for example, `pow(x, 2)` by `mul(x, x)`.

    The replaced calls are powers, and arithmetic in a low format with a Python number that this format does not represent exactly.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        power_of_float = node.target is aten.pow.Tensor_Scalar and node.args[0].meta["val"].dtype == node.meta["val"].dtype
        if power_of_float and node.args[1] in (1, 2):
            base, power = node.args
            node.target, node.args = (aten.mul.Tensor, (base, base)) if power == 2 else (aten.clone.default, (base,))
        elif power_of_float and node.args[1] == 3 and _is_fp32_on_cpu(node):
            base = node.args[0]
            with graph.inserting_before(node):
                square = graph.call_function(aten.mul.Tensor, (base, base))
            square.meta = {**node.meta}
            node.target, node.args = aten.mul.Tensor, (square, base)
        target = SPELLINGS.get(node.target, node.target)
        if target in (*_WIDE, *_ROUNDED) and _has_inexact_number(node):
            if target in _WIDE:
                _compute_in_fp32(graph, node)
            elif node.meta["val"].is_cpu:
                dtype = node.meta["val"].dtype
                node.args = tuple(_in_dtype(each, dtype) if isinstance(each, int | float) else each for each in node.args)


def _in_dtype(number: float, dtype: torch.dtype) -> Any:
    """Return `number` rounded to `dtype`, as a Python number."""
    return torch.tensor(number, dtype=dtype, device="cpu").item()


def _is_fp32_on_cpu(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_cpu and value.dtype == torch.float32


def _has_inexact_number(node: torch.fx.Node) -> bool:
    """True if all tensors of a call have one low format, and a number among the arguments is not exact in this format.

    False if the call has keyword arguments or a third argument, such as the factor `alpha` of a sum: `spell` leaves such a call unchanged.
    """
    result = node.meta.get("val")
    operands = [source.meta.get("val") for source in node.all_input_nodes]
    if not isinstance(result, Tensor) or result.dtype not in LOW_DTYPES or node.kwargs or len(node.args) > 2:
        return False
    same = all(isinstance(each, Tensor) and each.dtype == result.dtype for each in operands)
    return same and not all(survives(number, result.dtype) for number in numbers_of(node))


def _compute_in_fp32(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Make a call compute in fp32: cast its operands to fp32, and its result back, in place."""
    value = node.meta["val"]
    for source in node.all_input_nodes:
        with graph.inserting_before(node):
            wide = graph.call_function(prims.convert_element_type.default, (source, torch.float32))
        wide.meta = {**source.meta, "val": source.meta["val"].to(torch.float32)}
        node.replace_input_with(source, wide)
    with graph.inserting_after(node):
        low = graph.call_function(prims.convert_element_type.default, (node, value.dtype))
    low.meta = {**node.meta}
    node.meta["val"] = value.to(torch.float32)
    node.replace_all_uses_with(low, delete_user_cb=lambda user: user is not low)
