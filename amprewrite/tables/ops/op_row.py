"""What a row of the op table says: one op, one kind, one reason.

Names are ATen base names. A string in `rows` is a name followed by its other spellings in torch's dialects.
Kinds are those of the default lists; facts about kernels (what they accumulate in, which side arguments may stay fp32,
where a low kernel is missing) were measured on CPU and are tested there, and read from ATen's CUDA sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from amprewrite.tables.vocabulary import OpKind

ALLOW, INFER, CLEAR, DENY, INTERNAL = OpKind.ALLOW, OpKind.INFER, OpKind.CLEAR, OpKind.DENY, OpKind.INTERNAL

BOTH = ("cpu", "cuda")
ON_CPU = ("cpu:bf16", "cpu:fp16")
NOWHERE = (*ON_CPU, "cuda:bf16", "cuda:fp16")


@dataclass(frozen=True)
class Op:
    """A row of the op table."""

    name: str
    """ATen base name: "linear", "softmax", "layer_norm"."""
    kind: OpKind
    """Kind in the default lists."""
    why: str
    """One short phrase that is true of this op."""
    narrow: OpKind | None = None
    """Kind in a format of narrow range, if the range makes the difference: fp16 (65504, 6e-8)."""
    spellings: tuple[str, ...] = ()
    """Other names of the same op in torch's dialects."""
    data: tuple[str, ...] = ()
    """Names of the arguments that follow the op's colour; () means every floating tensor argument."""
    mixed_on: tuple[str, ...] = ()
    """Devices whose kernels take low data next to fp32 arguments that are not in `data`; elsewhere those are cast along."""
    promotes: bool = False
    """Operands of mixed dtype are promoted inside the kernel, forward and backward; the result has the widest."""
    bounded: bool = False
    """Denied for the sake of its input alone: its result fits low, so what follows need not stay high."""
    low_backward: tuple[str, ...] = ()
    """Devices whose backward adds up gradients in the low format, term by term: there it wants fp32 in training."""
    no_kernel: tuple[str, ...] = ()
    """Where no low kernel exists, forward or backward, for some form of the op: "cpu:fp16", "cuda:bf16"."""
    small: Literal["", "pole", "passes", "sums"] = ""
    """What small values do to it. pole: flushed to zero they give an infinity; passes: its result is small, too; sums: if all are."""
    view: bool = False
    """Moves no bytes: its result is, as a rule, the memory of its operand."""


def rows(kind: OpKind, why: str, *names: str, **fields: Any) -> Iterator[Op]:
    """Rows that share all but their names; each string is a name and its spellings."""
    for words in names:
        name, *spellings = words.split()
        yield Op(name, kind, why, spellings=tuple(spellings), **fields)
