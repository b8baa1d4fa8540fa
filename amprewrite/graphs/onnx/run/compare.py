"""Measure the relative error between two runs of ONNX models, warn if a result is not finite, and check that a raised opset is harmless.

`strict_outputs` runs a rewritten file strictly: every op computes in fp32, and each low result is really rounded. ONNX Runtime's CPU
provider runs chains of fp16 ops in fp32 and drops the casts between them, so its outputs hide rounding and overflow; for bf16 it has hardly
any kernels at all. So `strict_model` makes a copy of the file in which each rounding is explicit:

1. A low value keeps its name and becomes fp32, so that its readers compute in fp32.
2. The node that makes the value gets an fp32 result of another name. A cast to the low format and a cast back to fp32 make the value from
   this result. If the node is a constant, a cast or a fill, its result is low already, so only the cast back is inserted.
3. ONNX Runtime runs the copy without optimisations, so that no cast is fused away.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from amprewrite.graphs.onnx.ops import all_types, changed_ops, format_of, to_proto
from amprewrite.graphs.onnx.run.onnx_runtime import Runnable, TimeLimit, is_large, run_within, seconds_for, session_of, weight_bytes
from amprewrite.graphs.onnx.run.samples import Feed, Samples, has_numbers
from amprewrite.tables.errors import AmpRewriteWarning, CaptureError
from amprewrite.tables.formats import LOW_FORMATS, Format
from amprewrite.tables.ops.onnx_names import FLOW, ROUNDS_NOTHING, TYPED_BY_ATTRIBUTE


def relative_error(wanted: Sequence[Sequence[Any]], got: Sequence[Sequence[Any]]) -> float:
    """Return the relative L2 error of all floating outputs `got` together against `wanted`.

    `wanted` and `got` hold one list of outputs for each run. The error is infinite if `got` is not finite where `wanted` is, or if outputs
    differ in number or shape. It is absolute if all numbers in `wanted` are zero.
    """
    if _shapes(wanted) != _shapes(got):
        return float("inf")
    error = size = 0.0
    for want, have in zip(_arrays(wanted), _arrays(got), strict=True):
        if want.dtype.kind != "f":
            continue
        left, right = want.astype(np.float64), have.astype(np.float64)
        same = np.isfinite(left)
        if not np.isfinite(right[same]).all():
            return float("inf")
        error += float(((left - right)[same] ** 2).sum())
        size += float((left[same] ** 2).sum())
    return (error / size) ** 0.5 if size else error**0.5


def worst_error(wanted: Sequence[Sequence[Any]], got: Sequence[Sequence[Any]]) -> float:
    """Return the largest `relative_error` of any single output. An error over all outputs together would hide the error of a small one."""
    pairs = zip(zip(*wanted, strict=True), zip(*got, strict=True), strict=True)
    return max((relative_error([want], [have]) for want, have in pairs), default=0.0)


def resized(wanted: Sequence[Sequence[Any]], got: Sequence[Sequence[Any]]) -> set[int]:
    """Return the indices of the outputs whose shape differs between `wanted` and `got` in any run.

    Rounding may change the shape of an output if a condition on values selects its elements, as in a detector. `wanted` and `got` hold one
    list of outputs for each run, and all lists have the same length.
    """
    pairs = zip(wanted, got, strict=True)
    return {place for wants, gots in pairs for place, (a, b) in enumerate(zip(wants, gots, strict=True)) if _shapes(a) != _shapes(b)}


def _shapes(results: Any) -> list[tuple[int, ...]]:
    return [array.shape for array in _arrays(results)]


def is_measurable(outputs: Sequence[Sequence[Any]]) -> bool:
    """True if an output holds a finite floating number. Otherwise no error can be measured."""
    return any(array.dtype.kind == "f" and has_numbers(array) for array in _arrays(outputs))


def _arrays(results: Any) -> Iterator[np.ndarray]:
    """Yield the arrays in `results`: an array, a number, None (which yields nothing), or a nested list or mapping of such values."""
    if isinstance(results, np.ndarray | np.generic):
        yield np.asarray(results)
    elif isinstance(results, Mapping):
        for each in results.values():
            yield from _arrays(each)
    elif isinstance(results, list | tuple):
        for each in results:
            yield from _arrays(each)
    elif isinstance(results, int | float):
        yield np.asarray(results)


def tell_of_overflow(name: str, low: Format) -> str:
    """Warn that results of the rewritten model `name` are not finite where the original gives finite ones. Return the warning's text."""
    said = (
        f"{name} gives finite numbers on the samples, and the rewritten one does not in {low.name}; keep ops fp32 by overrides=, or take "
        "dtype='bf16': a sample run shows no ranges in bodies of If, Loop and Scan, and what is asked for goes before ranges"
    )
    warnings.warn(said, AmpRewriteWarning, stacklevel=2)
    return said


SAME = 1e-3
"""The results of a model at two opsets count as equal up to this relative error, because kernels may sum in a different order."""


def check_raised(name: str, stages: Sequence[ir.Model], samples: Samples, limit: TimeLimit = "auto") -> None:
    """Raise CaptureError unless it is shown that raising the opset of a model did not change its results.

    `stages` holds the model at each opset, from the original to the raised model. `samples` holds inputs, and the outputs of the raised
    model on them. ONNX Runtime lacks kernels for many old ops, so early stages may fail to run. The first stage that runs must give the
    same outputs. Each stage before it needs another proof: the schemas show that its ops compute the same at the next opset, or onnx's own
    evaluator gives the same outputs. The evaluator runs some old ops by new rules. So if its outputs differ, the error only says that
    a proof is missing.
    """
    for before, after in pairwise(stages):
        opset, raised = before.opset_imports[""], after.opset_imports[""]
        changed = changed_ops(before, raised)
        found = _runs(before, samples, limit)
        if found is not None:
            error = worst_error(found, samples.outputs)
            if not error <= SAME:
                said = f"onnx's version converter changes what {name} gives (by {error:.3g})"
                raise CaptureError(f"{said} when it raises its opset to {stages[-1].opset_imports['']}; export it again at a newer opset")
            return
        evaluated = _evaluations(before, samples) if changed else None
        if changed and (evaluated is None or not worst_error(evaluated, samples.outputs) <= SAME):
            raise CaptureError(
                f"{name} is of opset {opset}, and must be raised to {raised}, up to which {', '.join(changed)} changed; whether it gives "
                f"the same cannot be seen without a sample on which both run: pass calibration= on which they do, or export it at {raised}"
            )


def _runs(model: ir.Model, samples: Samples, limit: TimeLimit) -> list[list[Any]] | None:
    """Return the model's outputs on the samples in ONNX Runtime; None without samples, if the model does not run, or if two runs differ."""
    if not samples.feeds:
        return None
    with Runnable(model, limit) as runnable:
        if runnable.invalid() and runnable.failure(samples.feeds):
            return None
        try:
            runner = runnable.session()
            once, again = ([run_within(runner, None, feed, runnable.seconds) for feed in samples.feeds] for _ in range(2))
        except Exception:
            return None
    return once if relative_error(once, again) == 0 else None


def _evaluations(model: ir.Model, samples: Samples) -> list[list[Any]] | None:
    """Return the model's outputs on the samples in onnx's own evaluator; None if it does not run the model, or if two runs differ.

    The result is also None without samples, for a model too large for one protobuf, and for a model with If, Loop or Scan, since the
    evaluator has no time limit.
    """
    if not samples.feeds or is_large(model) or any(node.op_type in FLOW for graph in model.graphs() for node in graph):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runner: Any = ReferenceEvaluator(to_proto(model))
            once, again = ([runner.run(None, feed) for feed in samples.feeds] for _ in range(2))
        return once if relative_error(once, again) == 0 else None
    except Exception:  # the evaluator does not support some ops of old opsets
        return None


LOW = {row.name: onnx.TensorProto.DataType.Value(row.onnx) for row in LOW_FORMATS}
FP32 = onnx.TensorProto.FLOAT
ROUNDING = 4.0
"""The time limit of a strict run is this many times the usual limit, because every result is rounded and nothing is optimised."""


def strict_outputs(
    model: ir.Model, feeds: Sequence[Feed], proto: onnx.ModelProto | None = None, folder: Path | None = None, limit: TimeLimit = "auto"
) -> list[list[np.ndarray]]:
    """Return the outputs of the rewritten model, one list for each feed. Unlike in a plain run, every low result is really rounded.

    `proto` is the model as written to a file, with its external data in `folder`; None if the whole model is in memory. Raises TooSlow if a
    run takes longer than ROUNDING times the limit of an ordinary run.
    """
    with all_types(model):
        strict, renamed = strict_model(model, to_proto(model) if proto is None else proto)
    runner = session_of(strict, folder)
    ordinary = seconds_for(weight_bytes(model), limit)
    seconds = None if ordinary is None else ROUNDING * ordinary
    raised = (
        {renamed.get(name, name): array.astype(np.float32) if name in renamed else array for name, array in feed.items()} for feed in feeds
    )
    return [run_within(runner, None, feed, seconds) for feed in raised]


def strict_model(model: ir.Model, proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return (a copy of `proto` that computes in fp32 and rounds by Cast nodes, {old name: new name} of inputs that were low).

    `proto` is `model`, a rewritten model, as a protobuf. Neither is changed.
    """
    strict = onnx.ModelProto()
    strict.CopyFrom(proto)
    rounding: list[onnx.NodeProto] = []
    renamed: dict[str, str] = {}
    names = _UnroundedNames(model)
    for value, declared in zip(model.graph.inputs, strict.graph.input, strict=True):
        low = LOW.get(format_of(value))
        if low is not None:
            rounding += names.round(declared.name, low)
            renamed[declared.name] = names.raw(declared.name)
            declared.name = renamed[declared.name]
    _open_graph(model.graph, strict.graph, names, rounding)
    return strict, renamed


class _UnroundedNames:
    """Makes names for unrounded values: the name of the rounded value and a suffix that occurs in no name of the model."""

    def __init__(self, model: ir.Model) -> None:
        taken = {str(v.name) for g in model.graphs() for v in (*g.inputs, *g.initializers.values(), *(v for n in g for v in n.outputs))}
        self.mark = "__raw"
        while any(self.mark in name for name in taken):
            self.mark += "_"

    def raw(self, name: str) -> str:
        """Return the name of the unrounded form of the value `name`. The rounded form keeps `name`, which its readers use."""
        return name + self.mark

    def round(self, name: str, low: int) -> list[onnx.NodeProto]:
        """Return two Cast nodes, to the type `low` and back to fp32, that make the value `name` from its unrounded form `raw(name)`."""
        down = f"{self.raw(name)}_down"
        return [_cast(self.raw(name), down, low), _cast(down, name, FP32)]


def _open_graph(graph: ir.Graph, proto: onnx.GraphProto, names: _UnroundedNames, first: Sequence[onnx.NodeProto] = ()) -> None:
    """Make each rounding in `proto` and its subgraphs explicit, in place. Insert the nodes `first` at the beginning of `proto`.

    `proto` holds the same nodes in the same order as `graph`.
    """
    nodes = list(first)
    for tensor in proto.initializer:
        if tensor.data_type in LOW.values():
            nodes.append(_cast(names.raw(tensor.name), tensor.name, FP32))
            tensor.name = names.raw(tensor.name)
    for node, written in zip(graph, proto.node, strict=True):
        for attribute in written.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _open_graph(node.attributes[attribute.name].as_graph(), attribute.g, names)
        nodes.append(written)
        for place, value in enumerate(node.outputs):
            low = LOW.get(format_of(value))
            if low is None or not value.name or node.op_type in ROUNDS_NOTHING:
                continue
            written.output[place] = names.raw(value.name)
            aimed = node.op_type in TYPED_BY_ATTRIBUTE or "dtype" in node.attributes
            nodes += [_cast(names.raw(value.name), value.name, FP32)] if aimed else names.round(value.name, low)
    for declared in (*proto.input, *proto.output):
        if declared.type.tensor_type.elem_type in LOW.values():
            declared.type.tensor_type.elem_type = FP32
    kept = [onnx.NodeProto() for _ in nodes]
    for copy, each in zip(kept, nodes, strict=True):
        copy.CopyFrom(each)
    del proto.node[:]
    proto.node.extend(kept)
    del proto.value_info[:]


def _cast(source: str, result: str, to: int) -> onnx.NodeProto:
    node = onnx.NodeProto(op_type="Cast", input=[source], output=[result])
    node.attribute.add(name="to", type=onnx.AttributeProto.INT, i=to)
    return node
