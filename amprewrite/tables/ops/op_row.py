"""A row of the op table: one op, one kind, one reason.

Names are ATen base names. A string in `rows` is a name followed by its other spellings in torch's dialects. Kinds are the kinds of the
default lists. Facts about kernels (the format they accumulate in, arguments that may stay fp32, missing low kernels) were measured on CPU
and are tested there, and read from ATen's CUDA sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from amprewrite.tables.vocabulary import OpKind

ALLOW, INFER, CLEAR, DENY, INTERNAL = OpKind.ALLOW, OpKind.INFER, OpKind.CLEAR, OpKind.DENY, OpKind.INTERNAL

BOTH = ("cpu", "cuda")
ON_CPU = ("cpu:bf16", "cpu:fp16")
NOWHERE = (*ON_CPU, "cuda:bf16", "cuda:fp16")


class Trait(Enum):
    """Further facts about an op, whatever list it is on. `rows/traits.py` lists the ops of each."""

    CONVERTS = "changes a dtype and nothing else"
    TAKES_SHAPE_ONLY = "takes a shape, and unless told otherwise the dtype, of another tensor"
    READS_BITS = "reads the bits of its operand as another dtype if it is told one"
    FRESH = "reads any strides and gives memory of its own: what it reads may stay a view of something wider"
    STOPS_GRADIENT = "gives its operand's values, and takes no gradient for them"
    HIDES_WRITES = "gives its operand's memory, and autograd does not notice when that is written"
    CHOOSES = "its backward compares its result with its operand, and has no derivative with respect to it"
    RUNNING_STATISTICS = "a norm that may keep running statistics, and takes them and its weights in the same places"
    MAKES_MASK = "attention masks are made of it: it gives the same for the same arguments, and nothing else happens"
    PASSES_MASK = "gives the values of a mask as they are"
    KEEPS_ORDER = "gives the elements of its operand in their order, in another shape"
    MAKES_SCORES = "may stand between the sum of scores and mask, and the softmax"
    ZERO_MATTERS = "means something else if its constant is zero"
    FILLS = "writes its constant in some places"
    HOLDS_NUMBERS = "makes a tensor of the numbers that it is given"
    BOUNDS = "its constants are bounds of its result"
    LEVELS_BELOW = "gives one and the same, or nothing, for all numbers far below zero: it asks no more than that they are"
    LEVELS_ABOVE = "gives one and the same, or nothing, for all numbers far above zero"
    COMPARES = "says which of two numbers is larger, or whether they are the same"
    INVERSE = "has a pole at zero, but is finite on a small value, and hangs on it"
    MAGNIFIES_SMALL = "magnifies a small value"
    DIVIDES = "divides its first operand by its second"
    SCALES = "multiplies or divides its first operand by its second"
    RAISES = "raises its first operand to the power of its second"
    EXCHANGES_INFINITIES = "gives something finite for an infinity, or tells where infinities are"
    TAKES_EPSILON = "a small constant among its operands keeps its result from zero"
    DRAWS = "draws uniformly from below one"
    DRAWS_NORMAL = "draws from a normal distribution"
    KEEPS_DRAW = "what it makes of a uniform draw may still be one"
    RANDOM = "its numbers are drawn anew in each call, or are what the memory held"
    LOGARITHM = "a logarithm"
    LOGS_OF_BOTH = "takes the logarithm of its first operand, and of what that leaves of one"
    NEARS_ITS_ENDS = "its result lies between zero and one, and comes near them without end"
    SUMS_LAST_DIM = "a product that sums over the last dim of its first operand"
    READS_FP8 = "a product of rows and a matrix: kernels exist that read both in fp8"
    RANKS = "its result says which of many numbers are the largest"
    ADDS_PRODUCT = "adds the product of its second and third operands to its first"
    MULTIPLIES_ALL = "a product of all its operands, one after another"
    IN_POLYNOMIALS = "polynomials are made of it"
    MAKES_ZEROS = "makes a tensor of zeros"
    UNIFORM = "makes a tensor of one number"
    LINEAR_IN_ALL = "linear in all that it joins or adds up, numbers too"
    ADDS_UP = "adds its operands up, or takes one from another: what is left may be far smaller than they are"
    TAKES_AWAY = "takes one value from another, or from a number"
    TAKES_MEAN_AWAY = "takes away what its values have in common: what is left may be far smaller than they are"
    TAKES_BATCH_MEAN = "does so over the rows of a batch: a gradient in front of it is what many roundings leave of a difference"
    HAS_STEPS = "its result jumps where its operand passes a number, or another operand"
    HAS_KINKS = "its slope jumps where its operand passes a number, or another operand: a rounding may send a gradient elsewhere"
    AVERAGES = "adds up many elements to one, or takes their mean"
    SHARES_OUT = "turns scores into shares of one"
    NUMBERS = "makes a row of numbers, one after another"
    TOTALS = "adds up or multiplies many elements"
    WITHIN_ONE = "its result lies between minus one and one"
    STAYS_BELOW = "its result is no larger than a number among its arguments"
    LOOKS_UP = "looks up rows of a table that is learnt"
    JOINS = "linear in all that it joins or adds up; numbers among its arguments say where"
    LINEAR_IN_EACH = "linear in each of two operands while the other stays"
    LINEAR_IN_FIRST = "linear in its first operand while all else stays"
    RECURRENT = "runs a recurrent layer over a whole sequence"
    RECURRENT_STEP = "runs a recurrent cell once: an input, a state, and the weights of both"
    ATTENDS = "attention of queries, keys and values"
    ATTENDS_AND_PROJECTS = "attention with the products that make queries, keys, values and results"
    KEEPS_ZERO = "gives zero for zero, whatever its further arguments are"
    NO_LARGER = "keeps what is finite and small finite and small, and so does its slope"
    ONE_INPUT = "its further arguments do not change its numbers: they say where the result goes, or how exact it is"


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
    """Kind in a format of narrow range (fp16: 65504, 6e-8), if the range makes a difference."""
    spellings: tuple[str, ...] = ()
    """Other names of the same op in torch's dialects."""
    data: tuple[str, ...] = ()
    """Names of the arguments that follow the op's colour; () means every floating tensor argument."""
    mixed_on: tuple[str, ...] = ()
    """Devices whose kernels take low data with fp32 arguments that are not in `data`. On other devices these are cast along."""
    summands: tuple[str, ...] = ()
    """Names of the arguments that are only added to a product: numbers that a format flushes are below the rounding of the result."""
    promotes: bool = False
    """Operands of mixed dtype are promoted inside the kernel, forward and backward; the result has the widest."""
    bounded: bool = False
    """Denied only because of its input: its result fits low, so the ops after it need not stay high."""
    low_backward: tuple[str, ...] = ()
    """Devices whose backward adds up gradients in the low format, term by term: there it runs in fp32 in training."""
    uneven: tuple[str, ...] = ()
    """Devices whose low kernels round some elements of a tensor twice and others once, so that a row depends on its batch."""
    no_kernel: tuple[str, ...] = ()
    """Devices and formats without a low kernel, forward or backward, for some form of the op: "cpu:fp16", "cuda:bf16".

    PyTorch refuses low values there, or converts them to fp32 and runs several ops.
    """
    unset: tuple[str, ...] = ()
    """Devices and formats whose low backward leaves parts of a gradient unwritten for some sizes (`graphs/fx/flow/kernel_pins.py`)."""
    writes: tuple[tuple[str, str], ...] = ()
    """Arguments that it writes though its name does not say so, each with the argument that switches the write off by None or False."""
    forms: tuple[tuple[str, bool | str, str], ...] = ()
    """(argument, value, op): with this value of the argument it is another op. {} stands for the number of dims that it pads or resizes."""
    small: Literal["", "pole", "passes", "sums"] = ""
    """Effect of small values. pole: flushed to zero they give an infinity; passes: its result is small, too; sums: if all are small."""
    asks: bool = False
    """Queries a tensor without reading its numbers, unless it returns numbers itself, as `x.T` does."""
    view: bool = False
    """Moves no bytes: its result usually shares the memory of its operand."""
    traits: frozenset[Trait] = frozenset()
    """Further facts about it, filled in from `rows/traits.py`."""


def rows(kind: OpKind, why: str, *names: str, **fields: Any) -> Iterator[Op]:
    """Rows that share all but their names; each string is a name and its spellings."""
    for words in names:
        name, *spellings = words.split()
        yield Op(name, kind, why, spellings=tuple(spellings), **fields)
