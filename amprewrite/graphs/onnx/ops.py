"""ONNX ops in amprewrite's vocabulary, and what their schemas say: which operands share the result's type, which types they take.

One table maps op types to ATen base names; everything else is read off onnx.defs, at the opset of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir

from amprewrite.graphs.onnx.contrib import CONTRIB, DOMAIN
from amprewrite.tables.formats import FORMATS, Format

DTYPES = {row.name: ir.DataType[row.onnx] for row in FORMATS.values()}
FLOATS = {dtype: name for name, dtype in DTYPES.items()}
_TYPE_STRINGS = {row.name: row.onnx_type for row in FORMATS.values()}
_FIXED = {
    "tensor(float)": ir.DataType.FLOAT, "tensor(int32)": ir.DataType.INT32, "tensor(int64)": ir.DataType.INT64,
    "tensor(bool)": ir.DataType.BOOL,
}  # fmt: skip
OLDEST = 7
"""Opsets before it broadcast by attribute: they are raised to it."""
NEWEST = 24
"""No opset is raised beyond it: runtimes in use do not load newer ones, so an op that takes a type only there stays fp32."""
FLOW = {"If", "Loop", "Scan"}
"""Ops whose bodies are read as part of the graph around them."""
QUANTISED = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
HEAVY = {"MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN", "Attention", "Einsum"}

VOCABULARY: dict[str, str] = {
    # matrix products
    "Attention": "scaled_dot_product_attention", "Conv": "conv2d", "ConvTranspose": "conv_transpose2d", "Einsum": "einsum",
    "GRU": "gru", "Gemm": "addmm", "LSTM": "lstm", "MatMul": "matmul", "RNN": "rnn_tanh",
    # norms, reductions, activations
    "AveragePool": "avg_pool2d", "BatchNormalization": "batch_norm", "Celu": "celu", "Elu": "elu", "Erf": "erf", "Gelu": "gelu",
    "GlobalAveragePool": "adaptive_avg_pool2d", "GroupNormalization": "group_norm", "HardSigmoid": "hardsigmoid",
    "HardSwish": "hardswish", "InstanceNormalization": "instance_norm", "LRN": "local_response_norm",
    "LayerNormalization": "layer_norm", "LeakyRelu": "leaky_relu", "LogSoftmax": "log_softmax", "LpNormalization": "normalize",
    "MeanVarianceNormalization": "instance_norm", "Mish": "mish", "PRelu": "prelu", "RMSNormalization": "rms_norm",
    "ReduceL1": "norm", "ReduceL2": "norm", "ReduceLogSum": "logsumexp", "ReduceLogSumExp": "logsumexp", "ReduceMax": "amax",
    "ReduceMean": "mean", "ReduceMin": "amin", "ReduceProd": "prod", "ReduceSum": "sum", "ReduceSumSquare": "linalg_norm",
    "Relu": "relu", "Resize": "interpolate", "Selu": "selu", "Sigmoid": "sigmoid", "Softmax": "softmax", "Softplus": "softplus",
    "Softsign": "softsign", "Swish": "silu", "Tanh": "tanh", "ThresholdedRelu": "relu", "Upsample": "interpolate",
    # arithmetic
    "Abs": "abs", "Acos": "acos", "Acosh": "acosh", "Add": "add", "Asin": "asin", "Asinh": "asinh", "Atan": "atan",
    "Atanh": "atanh", "Ceil": "ceil", "Clip": "clamp", "Cos": "cos", "Cosh": "cosh", "CumSum": "cumsum", "Det": "linalg_det",
    "Div": "div", "Exp": "exp", "Floor": "floor", "Log": "log", "Max": "maximum", "Mean": "mean", "Min": "minimum",
    "Mod": "remainder", "Mul": "mul", "Neg": "neg", "Pow": "pow", "Reciprocal": "reciprocal", "Round": "round", "Sign": "sign",
    "Sin": "sin", "Sinh": "sinh", "Sqrt": "sqrt", "Sub": "sub", "Sum": "add", "Tan": "tan",
    # moving numbers
    "Cast": "to", "CenterCropPad": "pad", "Compress": "masked_select", "Concat": "cat", "ConstantOfShape": "full",
    "DepthToSpace": "pixel_shuffle", "Dropout": "dropout", "Expand": "expand", "Flatten": "flatten", "Gather": "embedding",
    "GatherElements": "gather", "GatherND": "index", "GlobalMaxPool": "amax", "Identity": "alias", "MaxPool": "max_pool2d",
    "OneHot": "scatter", "Pad": "constant_pad_nd", "Reshape": "view", "ReverseSequence": "flip", "Scatter": "scatter",
    "ScatterElements": "scatter", "ScatterND": "index_put", "Slice": "slice", "SpaceToDepth": "pixel_unshuffle",
    "Split": "split", "Squeeze": "squeeze", "Tile": "tile", "TopK": "topk", "Transpose": "permute", "Trilu": "tril",
    "Unsqueeze": "unsqueeze", "Where": "where",
    # read floats, give none
    "ArgMax": "argmax", "ArgMin": "argmin", "Equal": "eq", "Greater": "gt", "GreaterOrEqual": "ge", "IsInf": "isinf",
    "IsNaN": "isnan", "Less": "lt", "LessOrEqual": "le", "NonZero": "nonzero", "Shape": "size", "Size": "numel",
    # denied
    "AffineGrid": "affine_grid", "Bernoulli": "bernoulli", "BlackmanWindow": "blackman_window",
    "DequantizeLinear": "dequantize", "DFT": "_fft_c2c", "GridSample": "grid_sample", "HammingWindow": "hamming_window",
    "HannWindow": "hann_window", "QuantizeLinear": "quantize_per_tensor", "Range": "arange", "STFT": "stft",
}  # fmt: skip
"""ONNX op type → vocabulary name. What is missing is a high-precision wall."""

_POWERS = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal", 1.0: "alias", 2.0: "square", 3.0: "square"}
"""Exponents that are plain arithmetic."""
SIDE_FOLLOWS = {"Pow", "BatchNormalization", "Attention", "RMSNormalization"}
"""Ops whose float operands beyond the result's own type go along with it: kernels of mixed types are rare."""


def op_of(node: ir.Node) -> str:
    """Vocabulary name of a node; the op type, with its domain, where there is none."""
    if node.domain == DOMAIN and node.op_type in CONTRIB:
        return CONTRIB[node.op_type].name
    if node.domain not in ("", "ai.onnx"):
        return f"{node.domain}::{node.op_type}"
    if node.op_type == "Pow" and len(node.inputs) == 2 and node.inputs[1] is not None:
        return _POWERS.get(_scalar(node.inputs[1]), "pow")
    reduction = node.attributes.get("reduction")
    if reduction is not None and node.op_type.startswith("Scatter") and reduction.as_string() != "none":
        return "scatter_reduce"
    return VOCABULARY.get(node.op_type, node.op_type)


def _scalar(value: ir.Value) -> float:
    """The number that a constant of one element holds; NaN for anything else."""
    tensor = constant_tensor(value)
    return float(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else float("nan")


def constant_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of an initialiser that is no input, or of a Constant node; None for what is computed or passed in."""
    if value.is_initializer() and not value.is_graph_input():
        return value.const_value
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    for name in ("value", "value_float", "value_floats"):
        if name in node.attributes:
            held = node.attributes[name].value
            return held if name == "value" else ir.tensor(np.asarray(held, np.float32))
    return None


@dataclass(frozen=True)
class Signature:
    """What the schema of an op says of floats."""

    inputs: tuple[str, ...]
    """Type variable or type of each formal input; the last repeats where the op takes any number."""
    outputs: tuple[str, ...]
    takes: tuple[tuple[str, frozenset[str]], ...]
    """Types that each type variable may stand for."""
    variadic: bool

    def input(self, index: int) -> str:
        return self.inputs[min(index, len(self.inputs) - 1)] if self.inputs else ""

    def output(self, index: int) -> str:
        return self.outputs[min(index, len(self.outputs) - 1)] if self.outputs else ""

    def allows(self, variable: str, fmt: Format) -> bool:
        return any(name == variable and _TYPE_STRINGS[fmt.name] in types for name, types in self.takes)

    def follows(self, op_type: str, index: int, group: str, fmt: Format) -> bool:
        """Whether operand `index` has the type of `group`, or is cast along with it."""
        return self._goes_along(self.input(index), op_type, group, fmt)

    def result_follows(self, op_type: str, index: int, group: str, fmt: Format) -> bool:
        """Whether result `index` has the type of `group`, or one that goes along with it."""
        return self._goes_along(self.output(index), op_type, group, fmt)

    def _goes_along(self, own: str, op_type: str, group: str, fmt: Format) -> bool:
        return own == group or (op_type in SIDE_FOLLOWS and self.allows(own, fmt))


@cache
def signature(domain: str, op_type: str, opset: int) -> Signature | None:
    """The signature of an op at an opset; None for an op that onnx does not know."""
    if domain == DOMAIN:
        return _contrib_signature(op_type)
    try:
        schema = onnx.defs.get_schema(op_type, opset, "" if domain == "ai.onnx" else domain)
    except onnx.defs.SchemaError:
        return None
    takes = tuple((c.type_param_str, frozenset(c.allowed_type_strs)) for c in schema.type_constraints)
    many = onnx.defs.OpSchema.FormalParameterOption.Variadic
    variadic = bool(schema.inputs) and schema.inputs[-1].option == many
    return Signature(tuple(i.type_str for i in schema.inputs), tuple(o.type_str for o in schema.outputs), takes, variadic)


def _contrib_signature(op_type: str) -> Signature | None:
    row = CONTRIB.get(op_type)
    if row is None:
        return None
    words = {"U": _TYPE_STRINGS["fp32"], "I": "tensor(int32)"}
    own = frozenset(each.onnx_type for each in FORMATS.values() if each.ort_cpu or row.newer)
    inputs, outputs = (tuple(words.get(letter, letter) for letter in letters) for letters in (row.inputs, row.outputs))
    return Signature(inputs, outputs, (("T", own), ("M", own)), False)


def fill_types(node: ir.Node, opset: int) -> None:
    """Give results without a type the one that the schema says: that of an operand of the same type variable, or a fixed one."""
    if all(value.type is not None for value in node.outputs):
        return
    if node.op_type == "Cast" and not node.domain:
        node.outputs[0].type = ir.TensorType(ir.DataType(node.attributes["to"].as_int()))
    if node.op_type == "Constant" and not node.domain:
        _fill_constant(node)
    sig = signature(node.domain, node.op_type, opset)
    if sig is None:
        return
    known = {sig.input(index): v.type for index, v in enumerate(node.inputs) if v is not None and v.type is not None}
    for index, value in enumerate(node.outputs):
        spelled = sig.output(index)
        if value.type is not None:
            continue
        if isinstance(known.get(spelled), ir.TensorType):
            value.type = known[spelled]
        elif spelled in _FIXED:
            value.type = ir.TensorType(_FIXED[spelled])


_CONSTANTS = {
    "value_float": ir.DataType.FLOAT, "value_floats": ir.DataType.FLOAT, "value_int": ir.DataType.INT64, "value_ints": ir.DataType.INT64,
}  # fmt: skip


def _fill_constant(node: ir.Node) -> None:
    """The type of a Constant's result is that of the tensor or numbers it holds."""
    held = node.attributes.get("value")
    kinds = [_CONSTANTS[name] for name in node.attributes if name in _CONSTANTS]
    if held is not None and held.type == ir.AttributeType.TENSOR:
        kinds.append(held.as_tensor().dtype)
    if kinds:
        node.outputs[0].type = ir.TensorType(kinds[0])


def opset_taking(op_type: str, opset: int, fmt: Format) -> int:
    """The lowest opset from `opset` to NEWEST at which the op's first result may be in `fmt`; `opset` where none does."""
    for version in range(opset, NEWEST + 1):
        found = signature("", op_type, version)
        if found is not None and found.allows(found.output(0), fmt):
            return version
    return opset


def format_of(value: ir.Value | None) -> str:
    """Short name of a value's dtype; "" if it is unknown or no tensor."""
    if value is None or not isinstance(value.type, ir.TensorType):
        return ""
    return FLOATS.get(value.type.dtype, value.type.dtype.name.lower())


def low_dtype(fmt: Format) -> ir.DataType:
    return DTYPES[FORMATS[fmt.name].name]
