"""The table of padding rules, with one row for each op. `padding/rule.py` explains rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from amprewrite.ir.op_graph import Call
from amprewrite.planner.padding.rule import Rule, View
from amprewrite.planner.padding.rules.pointwise import ABOVE_ZERO, ALWAYS, AT_ZERO, binary, clamp, pointwise, power, prelu, where
from amprewrite.planner.padding.rules.products import (
    attention,
    batch_norm,
    channels,
    conv,
    einsum,
    embedding,
    linear,
    matmul,
    normalised,
    recurrent,
    reduction,
    with_addend,
)
from amprewrite.planner.padding.rules.shapes import (
    cat,
    chunks,
    expand,
    getitem,
    like,
    narrow,
    padded,
    permuted,
    reshape,
    select,
    stack,
    zeros,
)
from amprewrite.tables.formats import CONVERSIONS


def _rows(maker: Callable[[View], Rule], *names: str) -> dict[str, Callable[[View], Rule]]:
    return dict.fromkeys(names, maker)


RULES: dict[str, Callable[[View], Rule]] = {
    **_rows(pointwise, *sorted({*ALWAYS, *ABOVE_ZERO, *AT_ZERO} - {"prelu"})),
    **_rows(prelu, "prelu"),
    **_rows(binary, "add", "sub", "rsub", "mul", "div", "maximum", "minimum"),
    **_rows(clamp, "clamp"),
    **_rows(power, "pow"),
    **_rows(where, "where", "masked_fill"),
    **_rows(like, "cast", "contiguous", "clone", "detach", "_get_data_attr", "alias", "to", "type", "type_as", *CONVERSIONS),
    **_rows(reshape, "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"),
    **_rows(permuted, "permute", "transpose", "t"),
    **_rows(expand, "expand", "broadcast_to"),
    **_rows(zeros, "zeros"),
    **_rows(getitem, "getitem"),
    **_rows(narrow, "narrow"),
    **_rows(select, "select"),
    **_rows(chunks, "chunk", "split", "split_with_sizes", "unbind"),
    **_rows(cat, "cat"),
    **_rows(stack, "stack"),
    **_rows(padded, "pad", "constant_pad_nd"),
    **_rows(reduction, "sum", "mean"),
    **_rows(batch_norm, "batch_norm"),
    **_rows(normalised, "layer_norm", "rms_norm", "group_norm", "instance_norm", "softmax", "log_softmax", "normalize"),
    **_rows(
        channels, "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
        "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "interpolate",
    ),
    **_rows(linear, "linear"),
    **_rows(matmul, "matmul", "mm", "bmm"),
    **_rows(with_addend, "addmm", "baddbmm"),
    **_rows(conv, "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    **_rows(attention, "scaled_dot_product_attention"),
    **_rows(einsum, "einsum"),
    **_rows(embedding, "embedding"),
    **_rows(partial(recurrent, gates=4), "lstm"),
    **_rows(partial(recurrent, gates=3), "gru"),
    **_rows(partial(recurrent, gates=1), "rnn_tanh", "rnn_relu"),
}  # fmt: skip
"""ATen base name of an op → function that returns the padding rule of a call of the op. Ops without a row are not padded."""


def rule_of(call: Call, calls: Mapping[str, Call]) -> Rule:
    """Return the padding rule of `call`, one of `calls`.

    No dim may be padded in three cases: the op has no row in RULES, the call writes to a tensor `out`, whose size is fixed, or
    `call.opaque` gives a reason, such as a write to an alias.
    """
    if call.opaque or call.kwargs.get("out") is not None:
        return Rule(why_opaque=call.opaque or "it writes to a tensor of logical size")
    maker = RULES.get(call.op)
    if maker is None:
        return Rule(why_opaque=f"{call.op} needs the logical size")
    return maker(View(call, calls))
