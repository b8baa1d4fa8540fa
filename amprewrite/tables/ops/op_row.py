"""`Op`, the class of rows of the op table: an op, its kind in the default lists, the reason, and properties of its kernels.

Names are ATen base names. A string that is passed to `rows` is a name followed by other spellings of it (torch functions, methods,
overloads). Tests check the fields about kernels, such as arguments that may stay fp32 and missing low kernels, on CPU. For CUDA these
fields were read from ATen's sources.
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
    """A property of an op in addition to its kind. `rows/traits.py` lists the ops that have each trait."""

    CONVERTS = "changes a dtype and nothing else"
    TAKES_SHAPE_ONLY = "takes the shape of another tensor, and its dtype if none is given"
    LIKE_SECOND = "takes the shape or dtype of its second operand, and none of its numbers"
    READS_BITS = "reads the bits of its operand as another dtype if it gets one"
    FRESH = "reads any strides and returns new memory: its operand may stay a view of a larger tensor"
    STOPS_GRADIENT = "returns its operand's values, and passes no gradient back"
    HIDES_WRITES = "returns its operand's memory, and autograd does not notice writes to it"
    CHOOSES = "its backward compares its result with its operand, and has no derivative with respect to it"
    RUNNING_STATISTICS = "a norm that may keep running statistics, and takes them and its weights in the same places"
    MAKES_MASK = "a pure op that builds attention masks: its result depends on its arguments alone"
    PASSES_MASK = "returns the values of a mask unchanged"
    KEEPS_ORDER = "returns the elements of its operand in their order, in another shape"
    HANDS_LAYOUT_ON = "its result lies in memory as its operand does, or as its operands do if they lie alike"
    MAKES_SCORES = "may be between the sum of scores and mask, and the softmax"
    ZERO_MATTERS = "has another meaning if its constant is zero"
    FILLS = "writes its constant in some places"
    HOLDS_NUMBERS = "makes a tensor of its numbers"
    BOUNDS = "its constants are bounds of its result"
    LEVELS_BELOW = "returns one constant, or ignores them, for all numbers far below zero: their size does not matter"
    LEVELS_ABOVE = "returns one constant, or ignores them, for all numbers far above zero"
    COMPARES = "says which of two numbers is larger, or whether they are the same"
    INVERSE = "has a pole at zero, but is finite on a small value, and depends on its size"
    MAGNIFIES_SMALL = "magnifies a small value"
    DIVIDES = "divides its first operand by its second"
    SCALES = "multiplies or divides its first operand by its second"
    EXCHANGES_INFINITIES = "returns a finite value for an infinity, or tests for infinities"
    TAKES_EPSILON = "a small constant among its operands keeps its result from zero"
    DRAWS = "draws uniformly from below a bound"
    DRAWS_NORMAL = "draws from a normal distribution"
    RANDOM = "its numbers are drawn anew in each call, or are uninitialised memory"
    UNSET = "returns uninitialised memory"
    LOGARITHM = "a logarithm"
    LOGS_OF_BOTH = "takes the logarithm of its first operand p, and of 1 - p"
    NEARS_ITS_ENDS = "its result lies between zero and one, and comes arbitrarily close to them"
    SUMS_LAST_DIM = "a product that sums over the last dim of its first operand"
    READS_FP8 = "a product of rows and a matrix: kernels exist that read both in fp8"
    RANKS = "its result says which of many numbers are the largest"
    ADDS_PRODUCT = "adds the product of its second and third operands to its first"
    MULTIPLIES_ALL = "a product of all its operands, one after another"
    IN_POLYNOMIALS = "an op of polynomials"
    MAKES_ZEROS = "makes a tensor of zeros"
    UNIFORM = "makes a tensor of one number"
    LINEAR_IN_ALL = "linear in all operands that it joins or adds up, numbers too"
    ADDS_UP = "adds its operands or subtracts one from another: the result may be far smaller than they are"
    TAKES_AWAY = "subtracts one value from another, or from a number"
    TAKES_MEAN_AWAY = "subtracts the mean of its values: the result may be far smaller than they are"
    TAKES_BATCH_MEAN = "subtracts the mean over the rows of a batch: the gradient before it is a difference of many rounded values"
    HAS_STEPS = "its result jumps where its operand passes a number, or another operand"
    SLOPE_VARIES = "its slope jumps or fades where its operand passes a number or another operand: a rounding may change gradients a lot"
    AVERAGES = "adds up many elements to one, or takes their mean"
    SHARES_OUT = "turns scores into shares of one"
    NUMBERS = "makes a row of numbers, one after another"
    TOTALS = "adds up or multiplies many elements"
    WITHIN_ONE = "its result lies between minus one and one"
    STAYS_BELOW = "its result is between zero and a number among its arguments, or between two of these numbers"
    LOOKS_UP = "looks up rows of a learnt table"
    READS_WINDOWS = "each of its windows reads many elements, and an element may lie in many windows"
    ADDS_PATCHES = "adds up overlapping patches, on a CPU in the low format"
    JOINS = "linear in all operands that it joins or adds up; numbers among its arguments are positions"
    LINEAR_IN_EACH = "linear in each of two operands while the other stays"
    LINEAR_IN_FIRST = "linear in its first operand while all else stays"
    RECURRENT = "runs a recurrent layer over a whole sequence"
    RECURRENT_STEP = "runs a recurrent cell once: an input, a state, and the weights of both"
    ATTENDS = "attention of queries, keys and values"
    ATTENDS_AND_PROJECTS = "attention with the products that make queries, keys, values and results"
    KEEPS_ZERO = "returns zero for zero, whatever its further arguments are"
    NO_LARGER = "its result, and its slope, are finite and small for finite, small operands"
    ONE_INPUT = "its further arguments do not change its numbers: they say where the result goes, or how exact it is"


@dataclass(frozen=True)
class Op:
    """A row of the op table: one op, its kind in the default lists, and properties of its kernels that matter in low precision."""

    name: str
    """ATen base name: "linear", "softmax", "layer_norm"."""
    kind: OpKind
    """Kind in the default lists."""
    why: str
    """The reason for the kind, as one short phrase."""
    narrow: OpKind | None = None
    """Kind in a low format of narrow range (fp16, with a range of 6e-8 to 65504); None if it is `kind` there as well."""
    spellings: tuple[str, ...] = ()
    """Other names of the same op among torch's functions, methods and overloads."""
    data: tuple[str, ...] = ()
    """Names of the arguments whose dtype follows the op's colour (low or fp32). () means all floating point tensor arguments."""
    mixed_on: tuple[str, ...] = ()
    """Devices whose kernels accept low `data` arguments together with other arguments in fp32. Elsewhere all are cast to one dtype."""
    summands: tuple[str, ...] = ()
    """Names of the arguments that are only added to a product. A low format may flush small numbers in them to zero without harm, because
    such numbers are below the rounding error of the result."""
    promotes: bool = False
    """True if the kernel promotes operands of mixed dtypes itself, forward and backward. The result then has the widest of these dtypes."""
    bounded: bool = False
    """True if a denied op would be harmed by a low input, but its result fits the low format. So the ops after it need not stay fp32."""
    low_backward: tuple[str, ...] = ()
    """Devices whose low backward sums gradients in the low format. In training the op stays fp32 if torch.autocast sums them in fp32."""
    by_steps: tuple[str, ...] = ()
    """Devices that run a recurrent layer as separate ops for each time step, each of which reads the weights. `one_kernel`: exceptions."""
    one_kernel: tuple[str, ...] = ()
    """Exceptions to `by_steps`, such as "cpu:bf16": one kernel runs all time steps, if there are no projections and no packed sequences."""
    uneven: tuple[str, ...] = ()
    """Devices whose low kernels round some elements of a tensor twice and others once, so that a row's result depends on its batch."""
    no_kernel: tuple[str, ...] = ()
    """Devices and formats, such as "cpu:fp16" or "cuda:bf16", that lack a low kernel, forward or backward, for some form of the op. There
    PyTorch raises an error for low values, or converts them to fp32 and runs several ops."""
    unset: tuple[str, ...] = ()
    """Devices and formats whose backward leaves parts of a gradient uninitialised at some sizes (`graphs/fx/flow/kernel_pins.py`)."""
    writes: tuple[tuple[str, str], ...] = ()
    """(written argument, switch): arguments to which the op writes although its name does not end in an underscore. It does not write if
    its argument `switch` is None or False."""
    forms: tuple[tuple[str, bool | float | str, str], ...] = ()
    """(argument, value, op): a call with this value of the argument counts as the op `op`, as with ("exponent", -0.5, "rsqrt") for pow. A
    "{}" in the name `op` stands for the number of dims that the call pads or resizes."""
    small: Literal["", "pole", "passes", "sums"] = ""
    """Effect of small operands. "pole": if flushed to zero, they give an infinity. "passes": a small operand gives a small result. "sums":
    the result is small only if all summands are small. "": none of these is known."""
    asks: bool = False
    """True if the op only asks about a tensor, such as for its shape, and reads no numbers. `getattr` counts as well, although an
    attribute can be a tensor: `x.T` holds the elements of `x`."""
    view: bool = False
    """True if the op moves no bytes, since its result usually shares the memory of its operand."""
    traits: frozenset[Trait] = frozenset()
    """The traits of the op. `ops/op_lists.py` fills them in from `rows/traits.py`."""


def rows(kind: OpKind, why: str, *names: str, **fields: Any) -> Iterator[Op]:
    """Yield one row for each string in `names`: a name and other spellings of it, separated by spaces. The rows share all other fields."""
    for words in names:
        name, *spellings = words.split()
        yield Op(name, kind, why, spellings=tuple(spellings), **fields)
