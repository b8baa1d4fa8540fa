"""Tables from ONNX op types to amprewrite's op names: the op types of onnx, and those of ONNX Runtime's domain com.microsoft.

Exporters and ONNX Runtime's optimiser write ops of com.microsoft into files, but onnx has no schemas for them. So CONTRIB repeats the
registrations of ONNX Runtime 1.31 (docs/ContribOperators.md), and a test compares the two. An op without a row stays fp32, such as
MatMulNBits and the other quantised ops.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOW = {"If", "Loop", "Scan"}
"""Ops that contain body graphs. A body graph is read as a part of the graph around its op."""
QUANTISED = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
PLACES = {"ConstantOfShape": (0,), "Scatter": (1,), "ScatterElements": (1,), "ScatterND": (1,), "Pad": (1, 3), "CenterCropPad": (1,)}
PLACES |= {"Resize": (1, 2, 3), "Upsample": (1,)}
"""For each op type: positions of the operands that hold a shape, sizes or indices. Their numbers do not enter the numbers of the result."""

VOCABULARY: dict[str, str] = {
    # matrix products
    "Attention": "scaled_dot_product_attention", "Conv": "conv2d", "ConvTranspose": "conv_transpose2d", "Einsum": "einsum",
    "GRU": "gru", "Gemm": "addmm", "LSTM": "lstm", "MatMul": "matmul", "RNN": "rnn_tanh",
    # norms, reductions, activations
    "AveragePool": "avg_pool2d", "BatchNormalization": "batch_norm", "Celu": "celu", "Elu": "elu", "Erf": "erf", "Gelu": "gelu",
    "GlobalAveragePool": "adaptive_avg_pool2d", "GroupNormalization": "group_norm", "HardSigmoid": "hardsigmoid",
    "HardSwish": "hardswish", "InstanceNormalization": "instance_norm", "LRN": "local_response_norm",
    "LayerNormalization": "layer_norm", "LeakyRelu": "leaky_relu", "LogSoftmax": "log_softmax", "LpNormalization": "normalize",
    "Mish": "mish", "PRelu": "prelu", "RMSNormalization": "rms_norm",
    "ReduceL1": "norm", "ReduceL2": "norm", "ReduceLogSum": "logsumexp", "ReduceLogSumExp": "logsumexp", "ReduceMax": "amax",
    "ReduceMean": "mean", "ReduceMin": "amin", "ReduceProd": "prod", "ReduceSum": "sum", "ReduceSumSquare": "linalg_norm",
    "Relu": "relu", "Resize": "interpolate", "Selu": "selu", "Sigmoid": "sigmoid", "Softmax": "softmax", "Softplus": "softplus",
    "Softsign": "softsign", "Swish": "silu", "Tanh": "tanh", "ThresholdedRelu": "relu", "Upsample": "interpolate",
    # arithmetic
    "Abs": "abs", "Acos": "acos", "Acosh": "acosh", "Add": "add", "Asin": "asin", "Asinh": "asinh", "Atan": "atan",
    "Atanh": "atanh", "Ceil": "ceil", "Clip": "clamp", "Cos": "cos", "Cosh": "cosh", "CumSum": "cumsum", "Det": "linalg_det",
    "Div": "div", "Exp": "exp", "Floor": "floor", "Log": "log", "Max": "maximum", "Mean": "mean", "Min": "minimum",
    "Mod": "remainder", "Mul": "mul", "Neg": "neg", "Pow": "pow", "Reciprocal": "reciprocal", "RotaryEmbedding": "mul",
    "Round": "round", "Sign": "sign", "Sin": "sin", "Sinh": "sinh", "Sqrt": "sqrt", "Sub": "sub", "Sum": "add", "Tan": "tan",
    # ops that move numbers
    "Cast": "to", "CenterCropPad": "pad", "Compress": "masked_select", "Concat": "cat", "ConstantOfShape": "full",
    "DepthToSpace": "pixel_shuffle", "Dropout": "dropout", "Expand": "expand", "Flatten": "flatten", "Gather": "embedding",
    "GatherElements": "gather", "GatherND": "index", "GlobalMaxPool": "amax", "Identity": "alias", "MaxPool": "max_pool2d",
    "OneHot": "scatter", "Pad": "constant_pad_nd", "Reshape": "view", "ReverseSequence": "flip", "Scatter": "scatter",
    "ScatterElements": "scatter", "ScatterND": "index_put", "Slice": "slice", "SpaceToDepth": "pixel_unshuffle",
    "Split": "split", "Squeeze": "squeeze", "Tile": "tile", "TopK": "topk", "Transpose": "permute", "Trilu": "tril",
    "Unsqueeze": "unsqueeze", "Where": "where",
    # ops that read floats and return other types
    "ArgMax": "argmax", "ArgMin": "argmin", "Equal": "eq", "Greater": "gt", "GreaterOrEqual": "ge", "IsInf": "isinf",
    "IsNaN": "isnan", "Less": "lt", "LessOrEqual": "le", "NonZero": "nonzero", "Shape": "size", "Size": "numel",
    # ops on the denylist, which stay fp32, and a random draw
    "AffineGrid": "affine_grid", "Bernoulli": "bernoulli", "BlackmanWindow": "blackman_window",
    "DequantizeLinear": "dequantize", "DFT": "_fft_c2c", "GridSample": "grid_sample", "HammingWindow": "hamming_window",
    "HannWindow": "hann_window", "QuantizeLinear": "quantize_per_tensor", "Range": "arange", "STFT": "stft",
}  # fmt: skip
"""ONNX op type → amprewrite's name of the op. Ops of a type that is missing stay fp32."""

POWERS = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal", 1.0: "alias", 2.0: "square", 3.0: "square"}
"""Constant exponent of a Pow → name of the op that the Pow is treated as."""
SIDE_FOLLOWS = {"Pow", "BatchNormalization", "Attention", "RMSNormalization"}
"""Ops whose schemas allow operands of another float type than the result. These get its type if possible: mixed kernels are rare."""
ROUNDS_NOTHING = FLOW | {"Identity", "Reshape", "Transpose"}
"""Op types that round nothing themselves: their results are copies of values that other ops computed."""
TYPED_BY_ATTRIBUTE = {"Cast", "Constant", "ConstantOfShape"}
"""Op types with an attribute that sets the type of the result, such as "to" of Cast. Ops with the attribute "dtype" are not listed."""

BROADCASTS = "broadcast"
"""The attribute by which ops before opset 7 asked for broadcasting."""
BY_ATTRIBUTE = {BROADCASTS, "axis", "consumed_inputs"}
"""Attributes of old opsets that a later op of the same type may lack: it broadcasts by shapes. `consumed_inputs` never had an effect."""
NEUTRAL = {("Cast", "saturate")}
"""Attributes of later opsets, as (op type, attribute), whose default does not change the op. `saturate` affects only casts to fp8."""

DOMAIN = "com.microsoft"


@dataclass(frozen=True)
class Contrib:
    """One op of com.microsoft: its name in amprewrite, and the types of its inputs and outputs."""

    name: str
    inputs: str
    """One letter for each input: T is the type that the op computes in, M another float type, U always fp32, I an integer type."""
    outputs: str = "T"
    """One letter for each output, as in `inputs`."""
    newer: bool = True
    """True if T may also be bf16, which ONNX Runtime's CPU kernels lack."""


CONTRIB = {
    "Attention": Contrib("scaled_dot_product_attention", "TTTITTI", "TT"),
    "BiasAdd": Contrib("add", "TTT", newer=False),
    "BiasGelu": Contrib("gelu", "TT"),
    "BiasSoftmax": Contrib("softmax", "TT", newer=False),
    "BiasSplitGelu": Contrib("gelu", "TT", newer=False),
    "EmbedLayerNormalization": Contrib("layer_norm", "IITTTTTII", "TIT", newer=False),
    "FastGelu": Contrib("gelu", "TT"),
    "FusedConv": Contrib("conv2d", "TTTT", newer=False),
    "FusedGemm": Contrib("addmm", "TTT", newer=False),
    "FusedMatMul": Contrib("matmul", "TT"),
    "Gelu": Contrib("gelu", "T"),
    "GroupNorm": Contrib("group_norm", "TMM", newer=False),
    "MultiHeadAttention": Contrib("scaled_dot_product_attention", "TTTTITTTII", "TTTM"),
    "NhwcConv": Contrib("conv2d", "TTT", newer=False),
    "QuickGelu": Contrib("silu", "T"),
    "RotaryEmbedding": Contrib("mul", "TITT"),
    "SkipGroupNorm": Contrib("group_norm", "TMMTT", "TT", newer=False),
    "SkipLayerNormalization": Contrib("layer_norm", "TTTTT", "TUUT"),
    "SkipSimplifiedLayerNormalization": Contrib("rms_norm", "TTTT", "TUUT"),
    "TransposeMatMul": Contrib("matmul", "TT"),
}
