"""Rows of the op table of kind INFER: ops that run in the low format (bf16, fp16) unless a denied op is upstream."""

from amprewrite.tables.ops.op_row import DENY, INFER, rows

ROWS = (
    *rows(INFER, "plain arithmetic: one rounding, no larger than its operands make it", "add _add_relu", promotes=True, small="sums"),
    *rows(INFER, "plain arithmetic: one rounding, no larger than its operands make it",
        "sub subtract", "rsub", "mul multiply", "div divide true_divide", "addcmul", "addcdiv", "outer ger", "kron", promotes=True),
    *rows(INFER, "plain arithmetic: one rounding, no larger than its operands make it", "floor_divide", "lerp", "diff", "addr"),
    *rows(INFER, "a sum of products, accumulated in fp32", "dot", "vdot linalg_vdot"),
    *rows(INFER, "a matrix times a vector: bound by bytes, so no cast is worth it", "mv", "addmv", "linalg_vecdot"),
    *rows(INFER, "a scaling by a constant", "deg2rad", "rad2deg"),
    *rows(INFER, "compresses the range: harmless on a value that is right", "sqrt", small="passes"),
    *rows(INFER, "compresses the range: harmless on a value that is right", "log1p special_log1p", "atan arctan", "asinh arcsinh"),
    *rows(INFER, "in fp16 a small operand makes it exceed 65504", "reciprocal", narrow=DENY, small="pole"),
    *rows(INFER, "in fp16 a small operand makes it exceed 65504", "rsqrt", narrow=DENY, small="pole", uneven=("cpu",)),
    *rows(INFER, "in fp16 what underflows to 0 becomes -inf", "log", "log2", "log10", narrow=DENY, small="pole"),
    *rows(INFER, "in fp16 it exceeds 65504 above 256", "square", narrow=DENY, small="passes"),
    *rows(INFER, "divides by a norm accumulated in fp32, whose squares leave fp16's range", "normalize", narrow=DENY),
    *rows(INFER, "an activation that scales or shifts: safe on a value that is right",
        "leaky_relu", "prelu _prelu_kernel", "softplus", "softsign", "tanhshrink", "softshrink", "erfc special_erfc", "alpha_dropout",
        "feature_alpha_dropout"),
    *rows(INFER, "an activation that scales by a random slope",
        "rrelu rrelu_with_noise rrelu_with_noise_functional", no_kernel=("cpu:fp16",)),
    *rows(INFER, "sums overlapping patches", "fold col2im"),
)  # fmt: skip
