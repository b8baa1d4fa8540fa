"""Write the fp8 products of a plan in ONNX's form: both operands pass through QuantizeLinear and DequantizeLinear.

    before   y = MatMul(x, w)
    after    q = QuantizeLinear(x, scale); d = DequantizeLinear(q, scale); y = MatMul(d, DequantizeLinear(w8, scale of w))

A scale is a constant in the low format: the largest magnitude of x in sample runs, or of w, divided by the largest number of e4m3. Larger
values saturate. A weight is stored in e4m3. Backends such as TensorRT turn the pattern into an fp8 product; other runtimes compute the same
numbers.

This file writes `QuantizeLinear` and `DequantizeLinear`.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir

from amprewrite.graphs.onnx.guesses import describe_copy
from amprewrite.graphs.onnx.names import FreshNames
from amprewrite.graphs.onnx.ops import add_constant, constant_tensor, drop_unread_constants, insert_behind
from amprewrite.graphs.onnx.read.reader import OnnxReading
from amprewrite.graphs.onnx.read.weights import NUMPY
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import E4M3, Format
from amprewrite.tables.recipes import SMALLEST, W

OPSET = 21
"""First opset in which QuantizeLinear and DequantizeLinear support bf16 and e4m3 in the form that compilers read."""
NUMBER = np.dtype(getattr(ml_dtypes, E4M3.library_name))
STORED = ir.DataType[E4M3.onnx]


def insert_quantised(model: ir.Model, reading: OnnxReading, plan: RegionPlan, largest: Mapping[str, float], low: Format) -> None:
    """Edit `model` in place so that the products of the plan read quantised operands. Products compute in `low`.

    `largest` has the largest magnitude of each value in samples. Raises PolicyError if a magnitude is missing or the opset is too old.
    """
    opset, names = model.opset_imports.get("", 0), FreshNames(model)
    if opset < OPSET and plan.quantised.copies:
        raise PolicyError(f"fp8 products need opset {OPSET}, and this file has {opset}: export it with opset={OPSET}")
    for copy in plan.quantised.copies:
        nodes = [reading.nodes[reader.rpartition(".")[0]] for reader in copy.readers]
        place = int(copy.role == W)
        value = nodes[0].inputs[place]
        assert value is not None
        if copy.role != W and copy.value not in largest:
            raise PolicyError(
                f"no sample shows the range of {copy.value}, which {copy.readers[0]} reads in fp8: pass calibration= with batches on which "
                "the model runs, or leave products= out"
            )
        made = _stored(model, names, value, low) if copy.role == W else _quantised(model, names, value, largest[copy.value], low)
        for node in nodes:
            node.replace_input_with(place, made)
    drop_unread_constants(model.graph)


def scale_for(amax: float, low: Format) -> np.ndarray:
    """Return the scale of values up to `amax`: the number to divide by, in `low`, rounded up so that `amax` does not saturate.

    The scale is limited, so that the largest number of e4m3 times the scale stays within the range of `low`.
    """
    number = NUMPY[low.name]

    def rounded(exact: float, up: bool) -> np.ndarray:
        near = np.asarray(exact, number)
        misses = float(near) < exact if up else float(near) > exact
        return np.nextafter(near, np.asarray(np.inf if up else 0, number)) if misses else near

    return min(rounded(max(amax, SMALLEST) / E4M3.max, up=True), rounded(low.max / E4M3.max, up=False))


def _stored(model: ir.Model, names: FreshNames, weight: ir.Value, low: Format) -> ir.Value:
    """Store a weight in e4m3, and return its dequantised value."""
    tensor = constant_tensor(weight)
    assert tensor is not None
    numbers = np.asarray(tensor.numpy(), np.float32)
    scale = scale_for(float(np.abs(numbers).max(initial=0)), low)
    scaled = np.clip(numbers / scale.astype(np.float32), -E4M3.max, E4M3.max).astype(NUMBER)
    stored = add_constant(model.graph, names.new(f"{weight.name}_{E4M3.name}"), scaled)
    return _read_back(model, names, stored, weight, add_constant(model.graph, names.new(f"{weight.name}_scale"), scale), low)


def _quantised(model: ir.Model, names: FreshNames, value: ir.Value, amax: float, low: Format) -> ir.Value:
    """Quantise a value of magnitudes up to `amax` to e4m3, right after its maker. Return its dequantised value in `low`."""
    scale = add_constant(model.graph, names.new(f"{value.name}_scale"), scale_for(amax, low))
    node = ir.node("QuantizeLinear", [value, scale, _zero(model, names)], name=names.new(f"quantise_{value.name}"))
    made = node.outputs[0]
    made.name = names.new(f"{value.name}_{E4M3.name}")
    describe_copy(made, value, ir.TensorType(STORED))
    insert_behind(model.graph, value.producer(), [node])
    return _read_back(model, names, made, value, scale, low)


def _read_back(model: ir.Model, names: FreshNames, made: ir.Value, like: ir.Value, scale: ir.Value, low: Format) -> ir.Value:
    """Insert the DequantizeLinear of the e4m3 value `made`, and return its result, which has the format `low`."""
    node = ir.node("DequantizeLinear", [made, scale, _zero(model, names)], name=names.new(f"dequantise_{like.name}"))
    node.outputs[0].name = names.new(f"{made.name}_read")
    describe_copy(node.outputs[0], like, ir.TensorType(ir.DataType[low.onnx]))
    insert_behind(model.graph, made.producer(), [node])
    return node.outputs[0]


def _zero(model: ir.Model, names: FreshNames) -> ir.Value:
    """Return the zero point of all quantised values, an e4m3 constant 0. It is added to the model at first use."""
    name = f"amprewrite_{E4M3.name}_zero"
    return model.graph.initializers.get(name) or add_constant(model.graph, names.new(name), np.zeros((), NUMBER))

