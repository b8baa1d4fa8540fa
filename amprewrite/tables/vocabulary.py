"""Shared enums: kinds of ops, edits of ops, colours (precisions) of nodes, reasons of colours, precisions under torch.autocast."""

from __future__ import annotations

from enum import Enum, IntEnum


class OpKind(Enum):
    """The kind of an op in the op lists, which says when the op runs in the low format (bf16 or fp16) and when in fp32."""

    ALLOW = "allow"
    """The op runs low, because Tensor Cores make it several times faster."""
    INFER = "infer"
    """The op runs low unless a denied op is upstream."""
    CLEAR = "clear"
    """The op is harmless in any precision, and takes the precision of its neighbours."""
    DENY = "deny"
    """The op runs in fp32, because it overflows or loses too many bits in low precision."""
    INTERNAL = "internal"
    """The op reads and writes low values, but its kernel computes and accumulates in fp32."""

    @classmethod
    def parse(cls, text: str) -> OpKind:
        """Return the kind whose value is `text`, such as "allow". Raises ValueError for any other word."""
        return cls(text)


class Edit(Enum):
    """The changes to single ops that a plan can list, in addition to casts and to pads for Tensor Cores."""

    DROP_CAUSAL_MASK = "drop causal mask"
    DROP_FULL_MASK = "drop full mask"
    LOOK_UP_MASK = "look up mask"
    LOOK_AT_MASK = "look at mask"
    GROUP_HEADS = "group heads"
    CONTIGUOUS_MASK = "contiguous mask"
    FP32_STATISTICS = "fp32 statistics"
    PAD_APART = "pad apart"
    RUN_IN_PARTS = "run in parts"
    CLAMP_CONSTANTS = "clamp constants"
    SPREAD_COPIES = "spread copies"
    WIDE_PRODUCT = "wide product"

    @property
    def says(self) -> str:
        """The effect of the edit in words that follow the name of the op, such as "takes no mask: ..."."""
        return _EDITS[self.value]


_EDITS = {
    "drop causal mask": "takes no mask: its own is made of sizes alone, and is causal",
    "drop full mask": "takes no mask: its own is made of sizes alone, and allows all positions",
    "look up mask": "takes no mask at sizes at which its own, made of sizes alone, is causal or allows all positions",
    "look at mask": "takes no mask in a forward in which its own is causal or allows all positions",
    "group heads": "reads each head of keys and values for a group of query heads, and no copies of it",
    "contiguous mask": "is copied so that the rows of attention masks lie in memory in order: fused kernels take no other masks",
    "fp32 statistics": "gets fp32 weights of one, so that its statistics stay fp32",
    "pad apart": "is padded by an op of its own: its low backward leaves gradients unset of weights that meet its padding alone",
    "run in parts": "runs in parts of 16 time steps, so that fp32 adds up the gradients of its weights over the parts",
    "spread copies": "has one low copy for groups of readers, and fp32 adds up the gradients of the groups",
    "wide product": "multiplies operands that are rounded to bf16, and its result is fp32",
    "clamp constants": "takes the ends of the low range for constants beyond it",
}


class Colour(Enum):
    """The precision that a node runs in."""

    LOW = "low"
    """The low format of the policy: fp16 or bf16."""
    HIGH = "high"
    """fp32, the node's format before the rewrite."""
    PLAIN = "plain"
    """Never cast, because the node carries no fp32 value: integers, booleans, half precision in the model's code, fp64, complex, sparse."""


class Held(IntEnum):
    """The precision that a value would have under torch.autocast, from 0 (the most exact) to 3 (in the low format)."""

    EXACT = 0
    """In fp32, and rounding may harm it: its elements may differ little around a large offset, or be far more exact than results of
    low products."""
    PLAIN = 1
    """In fp32, without an offset, and more exact than results of products: weights, table rows, results of norms, sums with such values."""
    ROUNDED = 2
    """In fp32, but computed from results of products, so that each element has about the rounding error of the low format."""
    LOW = 3
    """In the low format."""


class Reason(Enum):
    """Why a node has its colour (low, high or plain). Each value completes the sentence "NODE runs in COLOUR because …"."""

    ON_ALLOWLIST = "its op is on the allowlist"
    ON_DENYLIST = "its op is on the denylist"
    ON_INTERNALLIST = "its kernel computes in fp32 and it stands next to low values"
    AFTER_DENY = "a denied op is upstream"
    BETWEEN_ALLOW = "it lies between low ops"
    AFTER_ALLOW = "it directly follows a low op and no denied op feeds it"
    BESIDE_ALLOW = "it touches a low op and is harmless"
    FOLLOWS_INPUTS = "its inputs are low and its op follows them"
    WIDEST_INPUT = "one of its inputs is high and its op takes the widest"
    CHEAPER_LOW = "running it high would cost more in casts and bytes"
    CHEAPER_HIGH = "running it low would cost more in casts than it saves"
    NOT_REACHED = "no low op is near"
    FORCED = "the lists put every op there"
    UNLISTED = "its op is on no list"
    UNTYPED = "it reads a value of unknown type"
    NO_FLOAT = "it carries no fp32 value"
    NOT_DENSE = "its value is sparse or nested, and such values are never cast"
    HALF = "the model computes it in half precision itself"
    BOUNDARY = "it enters or leaves the graph as it did before"
    PARAMETER = "parameters stay in fp32: they are the master weights"
    EXPLICIT_DTYPE = "the model asks for this dtype by name"
    INSIDE_AUTOCAST = "the model's own autocast region decides there"
    OPAQUE = "inner graphs take and return fp32"
    BETWEEN = "granularity= leaves the code between parts as it is written"
    TRANSFORMED = "a torch.func transform around it runs it as it is written"
    UNSCALED = "gradients pass it unscaled, and the low format flushes small ones to zero"
    UNSEEN = "no sample run shows the range of a backward in user code"
    UNREAD = "nothing reads the result it leads to, so no sample run shows if it overflows"
    BODY = "the graph inside it returns it in that format"
    NO_KERNEL = "the device has no low kernel for it"
    UNSET = "its low backward there leaves gradients of some weights uninitialised"
    LOW_BACKWARD = "its backward adds up gradients in the low format there"
    UNEVEN = "its low kernel there rounds some elements twice, so that a row depends on its batch"
    REFUSED = "its op refused low inputs when tried"
    CONSTANT = "a constant it uses does not fit the low format"
    OUT_OF_RANGE = "values seen in a sample run do not fit the low format"
    CANCELS = "rounding it would be magnified by a difference"
    COUNTS = "it makes or multiplies numbers that count something, which the low format does not hold"
    UNROUNDED = "torch.autocast keeps it in fp32, and no product has rounded it yet"
    DRAWN = "it draws between two bounds, and the low format rounds draws to the bounds"
    MAGNIFIED = "torch.autocast keeps it in fp32, and what reads it would magnify its rounding"
    TOLD_APART = "a logarithm may tell its values near zero or one apart, which the low format does not hold"
    SMALL_STEPS = "it changes in many small steps, and rounding it would outweigh them"
    RUNNING_SUM = "it is a running sum, and each addition would round all of it"
    READ_BY_MANY = "many ops read it, and the low format would add their gradients up"
    SENSITIVE = "rounding it costs more accuracy than was asked for"
    RETURNED = "it is returned and read, or has hooks: one fp32 value for all"
    SHARED = "it shares memory with a result of the graph"
    READ_BACK = "it is returned and its backward reads it: one fp32 value for both"
    TIED = "memory ties it to a node of that colour"
    KEPT = "its backward reads values that a later write through .data changes, which a copy would not see"
    WRITES_STATE = "it writes in place to a model input, parameter or buffer"
    ASKED = "an override asks for it"
    IN_PLAN = "the given plan says so"
    AGREED = "it runs so in another graph of the model"
    DEVICE = "the device gains nothing from low precision there"
    FP32_POLICY = "the policy is fp32"
