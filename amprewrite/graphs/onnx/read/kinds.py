"""Choose the kind of an op of an ONNX file by its name, its attributes, and the values in sample runs.

This file has special code for `exp`, for an `einsum` that is a `mul`, and for `Cast`.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from amprewrite.graphs.onnx.ops import constant_tensor, format_of
from amprewrite.graphs.onnx.run.samples import Samples
from amprewrite.ir.evidence.range_rules import HEADROOM, POLES, near_a_pole, near_the_end
from amprewrite.tables.formats import FORMATS, LOW_NAMES, Format
from amprewrite.tables.ops.op_lists import OpLists, find_op
from amprewrite.tables.ops.products import sums_products
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

EXP_MOST = 8.0
"""Largest result of an exp that may run low. An exp multiplies the relative error of its input by the input, here by about two at most."""


@dataclass(frozen=True)
class Kinds:
    """Chooses the kinds of ops by the op lists and the ranges in samples. `asked_ops` are the ops that an override puts on a list."""

    low: Format
    lists: OpLists
    samples: Samples
    asked_ops: frozenset[str] = frozenset()

    def of(self, op: str, node: ir.Node) -> OpKind | None:
        """Return the kind of an op in the op lists; None if it is on no list.

        With the rule "cost" (the default planner) there are three exceptions, unless the user has an override for the op. An op that is
        denied only in fp16, for its range, gets its kind in bf16 if samples stay within the range. An einsum that sums over no dim of two
        operands, such as an outer product, is no matrix product. An exp of small numbers may run low, because it does not magnify errors.
        """
        row = find_op(op)
        assert row is not None
        kind = self.lists.kind(row.name)
        if self.lists.rule != "cost" or row.name in self.asked_ops:
            return kind
        if kind is OpKind.ALLOW and op == "einsum" and not sums_products(node.attributes.get_string("equation", "")):
            return self.lists.kind("mul")
        if kind is not OpKind.DENY:
            return kind
        if row.narrow is OpKind.DENY and row.kind is not OpKind.DENY:
            return row.kind if self.low.narrow and self._in_range(op, node) else kind
        small_exp = op == "exp" and self._in_range(op, node) and self.samples.ranges[str(node.outputs[0].name)].amax <= EXP_MOST
        return OpKind.INFER if small_exp else kind

    def _in_range(self, op: str, node: ir.Node) -> bool:
        """True if samples show that the fp32 operands and results of the op stay well within the range, and away from poles.

        Constant operands do not count. False if no other operand is fp32, or if samples lack the range of a value.
        """
        read = [v for v in node.inputs if v is not None and format_of(v) == "fp32" and constant_tensor(v) is None]
        made = [v for v in node.outputs if format_of(v) == "fp32"]
        for value in (*read, *made):
            seen = self.samples.ranges.get(str(value.name))
            if seen is None or near_the_end(seen.amax, self.low):
                return False
            if op in POLES and value in read and (seen.zeros or near_a_pole(seen.smallest, self.low)):
                return False
        return bool(read)

    def pin_cast(self, node: ir.Node) -> tuple[Colour, Reason, str] | None:
        """Return (high, reason, detail) for a Cast to fp32; None if the node may cast to the low format instead.

        The low format holds booleans, and integers that are small in samples, exactly. Values in half precision may be rounded once more,
        from fp16 to bf16, like any fp32 value that runs low.
        """
        source, seen = format_of(node.inputs[0]), self.samples.ranges.get(str(node.outputs[0].name))
        if source in ("fp32", self.low.name, "bool"):
            return None
        if source in LOW_NAMES and (FORMATS[source].narrow or seen is not None):
            return None  # half precision already. For bf16 to fp16 samples must give the range: `repaint-by-range` tests if fp16 holds it
        if source.startswith(("int", "uint")) and seen is not None and seen.amax * HEADROOM <= 2 / self.low.eps:
            return None  # the low format holds such integers exactly
        return Colour.HIGH, Reason.BOUNDARY, f"makes fp32 from {source}"
