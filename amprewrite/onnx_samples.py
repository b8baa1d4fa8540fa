"""Sample runs of an ONNX model in ONNX Runtime: inputs to run it on, and the magnitudes seen at every value.

1. Inputs are the caller's calibration data, or made up: normal noise for floats, valid indices for what feeds a table.
2. The fp32 model runs with its inner values as extra outputs, a few hundred MB of them at a time.
3. Of every floating value the least and the largest magnitude is kept, over all samples; nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from amprewrite.errors import CaptureError, PolicyError

Feed = dict[str, np.ndarray]
CHUNK = 2**28
"""Elements of inner values that one run may hold."""
MOST_BYTES = 1_800_000_000
"""Models with more weights than this do not fit one protobuf and are not run from memory."""
SIZES = ((2, 8), (1, 16), (1, 32), (1, 64), (1, 1))
"""Tries for (first dim, other dims) where a model leaves them open."""


@dataclass(frozen=True)
class Range:
    """Magnitudes seen at one value."""

    smallest: float
    largest: float

    def __or__(self, other: Range) -> Range:
        return Range(min(self.smallest, other.smallest), max(self.largest, other.largest))


@dataclass
class Samples:
    """What sample runs showed."""

    feeds: list[Feed] = field(default_factory=list)
    outputs: list[list[np.ndarray]] = field(default_factory=list)
    """Of the fp32 model, one list a feed."""
    ranges: dict[str, Range] = field(default_factory=dict)
    made_up: bool = True
    problem: str = ""
    """Why there are none."""


def session(model: onnx.ModelProto | bytes | str, level: int | None = None) -> Any:
    """An ONNX Runtime session on CUDA where it is there, else on the CPU. CaptureError with an install hint without a runtime."""
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise CaptureError(
            "ONNX Runtime is not installed, so the file cannot be run; "
            "pip install 'amprewrite[onnx]' for the CPU, 'amprewrite[onnx-gpu]' for CUDA"
        ) from error
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    levels = (
        ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
        ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    )
    if level is not None:
        options.graph_optimization_level = levels[level]
    known = ort.get_available_providers()
    providers = [p for p in ("CUDAExecutionProvider", "CPUExecutionProvider") if p in known]
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    return ort.InferenceSession(source, options, providers=providers)


def read_feeds(model: ir.Model, calibration: Any) -> list[Feed]:
    """The caller's samples: a mapping, several of them, or the path of an .npz file. PolicyError where one does not fit."""
    if isinstance(calibration, str | Path):
        try:
            with np.load(calibration) as archive:
                calibration = dict(archive)
        except (OSError, ValueError) as error:
            raise PolicyError(f"calibration={str(calibration)!r} cannot be read as .npz: {error}") from error
    samples = [calibration] if isinstance(calibration, Mapping) else calibration
    if not isinstance(samples, Iterable) or isinstance(samples, bytes):
        wanted = "a mapping of input names to arrays, several, or an .npz path"
        raise PolicyError(f"calibration= takes {wanted}, not {type(samples).__name__}")
    feeds = [_checked(model, sample, index) for index, sample in enumerate(samples)]
    if not feeds:
        raise PolicyError("calibration= holds no sample; leave it out to run on made-up inputs")
    return feeds


def _checked(model: ir.Model, sample: Any, index: int) -> Feed:
    inputs = {str(value.name): value for value in model.graph.inputs}
    if not isinstance(sample, Mapping):
        raise PolicyError(f"calibration sample {index} is a {type(sample).__name__}; give a mapping with {', '.join(inputs)}")
    if set(sample) != set(inputs):
        given = ", ".join(map(str, sample)) or "nothing"
        raise PolicyError(f"calibration sample {index} has {given}; the model's inputs are {', '.join(inputs)}")
    feed: Feed = {}
    for name, value in inputs.items():
        array = np.asarray(sample[name])
        wanted = value.dtype.numpy() if value.dtype is not None else array.dtype
        if array.dtype != wanted:
            raise PolicyError(f"calibration sample {index}: {name} is {array.dtype}, the model wants {wanted}")
        dims = list(value.shape) if value.shape is not None else list(array.shape)
        if len(dims) != array.ndim or any(isinstance(d, int) and d != have for d, have in zip(dims, array.shape, strict=True)):
            raise PolicyError(f"calibration sample {index}: {name} has shape {list(array.shape)}, the model wants {dims}")
        feed[name] = array
    return feed


# -- made-up inputs -----------------------------------------------------------------
def made_up_feeds(model: ir.Model) -> Iterator[Feed]:
    """Inputs to try, from likely to unlikely sizes of open dims; one only where no dim is open."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for first, rest in SIZES:
        feed = _made_up(model, first, rest)
        shapes = tuple(array.shape for array in feed.values())
        if shapes not in seen:
            seen.add(shapes)
            yield feed


def _made_up(model: ir.Model, first: int, rest: int) -> Feed:
    generator = np.random.default_rng(0)
    open_dims: dict[str, int] = {}
    feed: Feed = {}
    for value in model.graph.inputs:
        shape = []
        for place, dim in enumerate(value.shape if value.shape is not None else ()):
            size = first if place == 0 else rest
            shape.append(dim if isinstance(dim, int) else open_dims.setdefault(str(dim.value), size) if dim.value else size)
        feed[str(value.name)] = _noise(value, tuple(shape), generator)
    return feed


def _noise(value: ir.Value, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    dtype = value.dtype.numpy() if value.dtype is not None else np.dtype(np.float32)
    if dtype.kind == "b":
        return np.ones(shape, dtype)
    if dtype.kind in "iu":
        rows = _rows_indexed(value)
        return generator.integers(0, rows, shape).astype(dtype) if rows else np.ones(shape, dtype)
    return generator.standard_normal(shape).astype(dtype)


def _rows_indexed(value: ir.Value) -> int:
    """Rows of the table that an integer input indexes; 0 where it indexes none."""
    for node, place in value.uses():
        table = node.inputs[0]
        if node.op_type == "Gather" and place == 1 and table is not None and table.shape is not None:
            axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
            size = table.shape[axis]
            if isinstance(size, int):
                return size
    return 0


# -- runs ------------------------------------------------------------------------------
def observe(model: ir.Model, feeds: Sequence[Feed] | None, wanted: Iterable[ir.Value]) -> Samples:
    """Run the fp32 model and keep the magnitudes of the `wanted` values. `feeds` None: on made-up inputs."""
    samples = Samples(made_up=feeds is None)
    if weight_bytes(model) > MOST_BYTES:
        samples.problem = "the model is too large to be run from memory"
        return samples
    proto = ir.to_proto(model)
    chunks = list(_chunks(wanted))
    tries: Iterator[list[Feed]] = ([feed] for feed in made_up_feeds(model)) if feeds is None else iter([list(feeds)])
    for tried in tries:
        try:
            _run(proto, chunks, tried, samples)
        except CaptureError as error:
            samples.problem = str(error)
            return samples
        except Exception as error:
            samples.problem = " ".join(str(error).split())[:200]
            continue
        samples.feeds, samples.problem = tried, ""
        return samples
    if feeds is not None:
        raise PolicyError(f"the fp32 model does not run on the calibration data: {samples.problem}")
    return samples


def weight_bytes(model: ir.Model) -> int:
    return sum(v.const_value.nbytes for g in model.graphs() for v in g.initializers.values() if v.const_value is not None)


def _chunks(wanted: Iterable[ir.Value]) -> Iterator[list[ir.Value]]:
    chunk: list[ir.Value] = []
    held = 0
    for value in wanted:
        size = elements(value)
        if chunk and held + size > CHUNK:
            yield chunk
            chunk, held = [], 0
        chunk.append(value)
        held += size
    yield chunk


def elements(value: ir.Value) -> int:
    """Elements of a value; open dims count 64."""
    dims = (dim if isinstance(dim, int) else 64 for dim in (value.shape or ()))
    return int(np.prod([*dims, 1], dtype=np.int64))


def _run(proto: onnx.ModelProto, chunks: list[list[ir.Value]], feeds: list[Feed], samples: Samples) -> None:
    outputs: list[list[np.ndarray]] = [[] for _ in feeds]
    ranges: dict[str, Range] = {}
    own = [value.name for value in proto.graph.output]
    for first, chunk in zip(itertools.chain((True,), itertools.repeat(False)), chunks, strict=False):
        names = [str(value.name) for value in chunk if value.name not in own]
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        runner = session(proto, 0)
        del proto.graph.output[len(own) :]
        for index, feed in enumerate(feeds):
            found = dict(zip(own + names, runner.run(own + names, feed), strict=True))
            if first:
                outputs[index] = [found[name] for name in own]
            for name in (*names, *(own if first else ())):
                if found[name].dtype == np.float32 and found[name].size:
                    seen = _range(found[name])
                    ranges[name] = ranges[name] | seen if name in ranges else seen
    samples.outputs, samples.ranges = outputs, ranges


def _range(array: np.ndarray) -> Range:
    """Magnitudes of one result. NaN and infinities of the fp32 model itself do not count."""
    size = np.abs(array)
    low, high = float(size.min()), float(size.max())
    if not np.isfinite(high):
        finite = size[np.isfinite(size)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return Range(low, high)
