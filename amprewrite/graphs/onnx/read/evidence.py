"""Read facts from an ONNX graph that help passes to decide which ops run low.

1. Constants whose mean is larger than their spread: a norm later subtracts most of such a value, and rounding errors grow.
2. Products of rows and a constant matrix (`MatMul`, `Gemm`), whose operands may be quantised to fp8.
3. Matrix products in which a low format would round positions, lengths or time steps (`ir/evidence/counts.py`). A file does not say which
   constants are learnt, so their values decide. If a factor has fractions, it counts as a learnt weight, and the product as no
   position. The exception is a sum of at most `FEW` products of positions and frequencies, unless it is a `conv2d` or `conv_transpose2d`.
   `OneHot` (for `op_of` a "scatter") counts as "one_hot": its results are at most 1. A `Gather` of whole numbers counts as `index`.
   The number that fills a `ConstantOfShape` is an attribute. Results of `Constant` and `If` are judged when an op reads them.
4. The summands of linear ops, each with its factor. A long chain of sums with small factors, `x + 0.1 * f(x)`, stays fp32. A factor
   is a number, a constant that varies along one dim at most (its root mean square counts), or a schedule: a value of one element that is
   computed without products, such as the step size of a sampler. `loop` and `scan` have no summands (see `read_repeated`).
5. The ops that draw random numbers in each run. A `Dropout` counts only if its input `training_mode` may be true.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir

from amprewrite.graphs.onnx.ops import bodies, constant_tensor, format_of, op_of, scalar
from amprewrite.graphs.onnx.read.constants import fill_of
from amprewrite.graphs.onnx.read.reader import OnnxReading
from amprewrite.graphs.onnx.run.samples import elements
from amprewrite.ir.cost import MatrixProduct
from amprewrite.ir.evidence.counts import EXACT, FEW, FRACTIONS, Count, keep_counts, made_of, written_over
from amprewrite.ir.evidence.range_rules import added_values, has_offset, rows_have_offset, tables
from amprewrite.ir.evidence.summands import Factor, Summands, summands
from amprewrite.ir.op_graph import OpGraph, OpNode
from amprewrite.tables.formats import FP32
from amprewrite.tables.ops.onnx_names import PLACES
from amprewrite.tables.ops.op_lists import Trait, find_op, ops_with
from amprewrite.tables.vocabulary import OpKind

FACTORS = {"alpha": 1.0, "beta": 1.0, "transA": 0}
"""Attributes of Gemm that change the product, each with the value that leaves the product unchanged."""


def read_offsets(reading: OnnxReading) -> frozenset[str]:
    """Return the names of the fp32 constants whose numbers have an offset: a mean that is larger than their spread.

    A norm later subtracts this mean, and rounding errors then grow. Only two sorts of constants are tested: summands, such as the bias of
    an addition, and tables in which an op looks up rows."""
    added, looked_up = added_values(reading.graph), tables(reading.graph)
    found = {name for name, values in _values(reading, added) if values.size > 1 and has_offset(values, added[name])}
    rows = ((name, values) for name, values in _values(reading, looked_up) if values.ndim > 1)
    return frozenset(found | {name for name, values in rows if rows_have_offset(values)})


def _values(reading: OnnxReading, names: Iterable[str]) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Return a list of (name, values), one for each fp32 constant among the op-graph nodes `names`. Empty constants are left out."""
    held = ((name, reading.values[name]) for name in names if name in reading.values)
    constants = ((name, constant_tensor(value)) for name, value in held if format_of(value) == FP32.name)
    return [(name, tensor.numpy()) for name, tensor in constants if tensor is not None and tensor.size]


def read_matrix_products(reading: OnnxReading, top: ir.Graph) -> tuple[dict[str, MatrixProduct], list[str]]:
    """Return ({node name: product}, notes) for each MatMul or plain Gemm of the graph `top` whose second operand is a constant matrix.

    A plain Gemm has the attributes in FACTORS at their defaults. Both operands are marked as trained (`x_learns`, `w_learns`), so that
    passes decide as for a model in training. Products in subgraphs are left out, with a note: their fp8 scales would need sampled ranges.
    """
    found: dict[str, MatrixProduct] = {}
    inside = 0
    for name, node in reading.nodes.items():
        read = {slot.index: value for (reader, value), slots in reading.slots.items() if reader == name for slot in slots}
        factors = any(key in node.attributes and node.attributes[key].value != plain for key, plain in FACTORS.items())
        if node.op_type not in ("MatMul", "Gemm") or node.domain or factors or not {0, 1} <= read.keys():
            continue
        x, w = reading.graph[read[0]], reading.values[read[1]]
        if len(x.shape) < 2 or constant_tensor(w) is None or w.shape is None or w.shape.rank() != 2:
            continue
        if node.graph is not top:
            inside += 1
            continue
        straight = bool(node.attributes.get_int("transB", 0))
        columns, inner = w.shape.numpy() if straight else reversed(w.shape.numpy())
        found[name] = MatrixProduct(
            read[0], read[1], 0, 0, x.numel // max(inner, 1), inner, columns, x_learns=True, w_learns=True, transposed=not straight
        )
    note = f"products in bodies of If, Loop and Scan ({inside}) read no fp8: no sample run shows their ranges"
    return found, [note] if inside else []


def with_counts(reading: OnnxReading, model: ir.Model) -> OpGraph:
    """Return the op graph of `reading`, with a mark (`OpNode.counted`) on each matrix product that must keep whole numbers exact.

    Such numbers are positions, lengths, indices and time steps. A low format would make neighbouring numbers equal, so marked products run
    in fp32.
    """
    if not any(node.flops for node in reading.graph):
        return reading.graph
    names = {value: name for name, value in reading.values.items()}
    found = {value: _entering(value) for value in model.graph.inputs}

    def summed(node: OpNode) -> int:
        if node.op in ("conv2d", "conv_transpose2d"):
            return FEW + 1  # too many for the exception for frequencies (rule 3), because filters of convolutions are learnt weights
        return node.flops // (2 * max(elements(reading.values[node.name]), 1)) if node.name in reading.values else 0

    for node in model.graph.all_nodes():
        if node.op_type in ("Constant", "If") and not node.domain:
            continue  # `_read` reads the numbers of a constant, and looks into the branches of an If
        read = [value for place, value in enumerate(node.inputs) if value is not None and place not in PLACES.get(node.op_type, ())]
        given = [_read(value, found) for value in read]
        numbers = [number for value in read if (number := scalar(value)) is not None]
        numbers += fill_of(node).tolist() if node.op_type == "ConstantOfShape" else []
        op = "one_hot" if node.op_type == "OneHot" else op_of(node)
        op = "index" if node.op_type == "Gather" and given[0] >= Count.WHOLE else op
        for body in bodies(node):
            found |= {value: _entering(value) for value in body.inputs}
        row, made = find_op(op), [reading.graph[names[value]] for value in node.outputs if value in names]
        weighs = row is not None and row.kind is OpKind.ALLOW and Count.SMALL in given
        learnt = weighs and (Count.LARGE not in given or any(summed(each) > FEW for each in made))
        found |= {value: Count.NOT if learnt else made_of(op, format_of(value), given, numbers) for value in node.outputs}
    counts = {name: _read(value, found) for name, value in reading.values.items()}
    return keep_counts(reading.graph, counts, summed)


def _entering(value: ir.Value) -> Count:
    """Return the `Count` of an input of a graph or subgraph: whether it holds whole numbers, and how large they may be.

    For a floating or unknown dtype it is Count.NOT. For booleans and integers of at most 8 bits it is Count.WHOLE: whole numbers of at most
    256. Wider integers may be positions of any magnitude, so it is Count.LARGE."""
    dtype = format_of(value)
    return Count.NOT if dtype.startswith(FRACTIONS) or not dtype else made_of("", dtype, (), ())


def _read(value: ir.Value, found: dict[ir.Value, Count]) -> Count:
    """Return the `Count` of `value`: whether it is computed only from whole numbers and constants, and how large it may be.

    `found` holds the known results, and this one is added. The `Count` of a result of an `If` follows from its branches, and the `Count` of
    a constant from its elements. Any other value without an entry in `found` gets Count.NOT.
    """
    maker = value.producer()
    if value not in found and maker is not None and maker.op_type == "If":
        found[value] = written_over(*(_read(body.outputs[value.index() or 0], found) for body in bodies(maker)))
    elif value not in found:
        held = constant_tensor(value)
        numbers = np.zeros(0) if held is None or held.dtype.is_string() else np.asarray(held.numpy(), np.float64)
        whole = numbers.size > 0 and np.array_equal(numbers, np.round(numbers))
        beyond = whole and np.abs(numbers).max() > EXACT
        found[value] = Count.NOT if held is None else Count.LARGE if beyond else Count.WHOLE if whole else Count.SMALL
    return found[value]


RANDOM = ops_with(Trait.RANDOM)


def drawing_ops(model: ir.Model) -> list[str]:
    """Return the op types of `model` that draw random numbers in each run. A Dropout counts only if its `training_mode` may be true."""
    nodes = (node for graph in model.graphs() for node in graph if op_of(node) in RANDOM or node.op_type.startswith("Random"))
    return sorted({node.op_type for node in nodes if node.op_type != "Dropout" or any(on and scalar(on) != 0 for on in node.inputs[2:])})


BODIES = ("loop", "scan")


def read_repeated(reading: OnnxReading) -> frozenset[str]:
    """Return the names of the values that a loop or scan passes from one iteration to the next."""
    return frozenset(node.name for node in reading.graph if node.op in BODIES and node.precision_group)


def read_summands(reading: OnnxReading) -> dict[str, Summands]:
    """Return {name of a linear op: {name of a summand: its factor}}. A multiplication of x by 0.1, for example, has {"x": 0.1}."""
    names = {value: name for name, value in reading.values.items()}
    exact, found = set[str](), dict[str, Summands]()

    def name_of(value: ir.Value) -> str:
        return names.get(value, "") if constant_tensor(value) is None else ""

    def factor(given: Any, how: str) -> Factor | None:
        """Return the factor by which `given` scales a summand: `given` itself if `how` is "", 1 / `given` if `how` is "divided by".

        Return None if `given` is not one of these: a number (for a division, not 0), a constant that varies along one dim at most, or a
        schedule. A schedule is a value of one element that is computed without matrix products, such as the step size of a sampler.
        """
        tensor = constant_tensor(given) if isinstance(given, ir.Value) else None
        if tensor is not None:
            given = _size(tensor.numpy()) if sum(size > 1 for size in tensor.shape.numpy()) <= 1 and tensor.size else None
        if not isinstance(given, ir.Value):
            return None if given is None or (how and not given) else Factor(1.0 / given if how else given)
        name = names.get(given, "")
        schedule = name in exact and all(size == 1 for size in reading.graph[name].shape)
        return Factor(1.0, frozenset([(name, how)])) if schedule else None

    for node in reading.graph:
        if _is_exact(node, exact):
            exact.add(node.name)
        given = [each for each in reading.nodes[node.name].inputs if each is not None] if node.name in reading.nodes else []
        if node.role == "op" and node.op not in BODIES and (parts := summands(node.op, given, factor, name_of)):
            found[node.name] = parts
    return found


def _is_exact(node: OpNode, exact: set[str]) -> bool:
    """True if the result of `node` is computed without matrix products, random ops and loops. `exact` names all such results so far."""
    if node.role != "op":
        return node.role != "output"
    # Check the kind, too: a product of unknown shape has `flops == 0`, but its kind is ALLOW.
    if node.flops or node.kind is OpKind.ALLOW or node.op in RANDOM or node.op in BODIES:
        return False
    return all(operand.value in exact for operand in node.operands)


def _size(values: np.ndarray[Any, Any]) -> float:
    """Return the root mean square of `values`, with the sign of their mean."""
    return math.copysign(float(np.sqrt(np.square(values.astype(np.float64)).mean())), float(values.mean()))
