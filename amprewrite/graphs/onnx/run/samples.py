"""Run an ONNX model on samples, and record the magnitudes of its values.

1. Inputs are the caller's calibration data, or made up: normal noise for floats, valid indices for inputs that index a table.
2. The fp32 model runs with its inner values as extra outputs, at most about 1 GB of them in one run.
3. The ranges of all fp32 results in the top graph, and of all fp32 inputs that the caller gave, are recorded over all samples. Inputs and
   outputs of the first few samples are kept to measure errors. Samples are read one at a time: memory does not grow with their number.

This file has special code for `Gather`: the size of its table limits valid indices.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from amprewrite.graphs.onnx.check import memory, too_large
from amprewrite.graphs.onnx.ops import constant_tensor, format_of, guess, spelled_type
from amprewrite.graphs.onnx.run.onnx_runtime import Runnable, TimeLimit, TooSlow, run_within
from amprewrite.ir.evidence.ranges import ValueRange, merge
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.errors import PolicyError, one_line
from amprewrite.tables.ops.onnx_names import FLOW

Feed = dict[str, Any]
"""{name of an input: its value}. A value is an array, a list of arrays for a sequence, or None for an optional input that is omitted."""
CHUNK = 2**28
"""Largest total number of elements of the inner values that one run returns."""
SIZES = ((2, 8), (1, 16), (1, 32), (1, 64), (1, 1))
"""Sizes to try for open dims (dims without a fixed size): (size if the open dim is dim 0, size of other open dims)."""
KEPT = 8
"""Largest number of samples whose inputs and outputs are kept for measuring errors."""
KEPT_BYTES = 2**28
"""Largest number of bytes that the kept inputs and outputs may take together. The first sample is kept in any case."""
TAKES = "a mapping of input names to arrays, an .npz path, or an iterable of such"
"""Description of valid calibration data, for messages."""


class CallersError(Exception):
    """Wraps an error in the caller's code that makes samples, to distinguish it from our errors. The caller gets `original`."""

    def __init__(self, original: Exception) -> None:
        super().__init__(str(original))
        self.original = original


@dataclass
class Samples:
    """Results of fp32 runs of a model on samples: value ranges, inputs and outputs of some samples, and error texts."""

    feeds: list[Feed] = field(default_factory=list)
    """Inputs of the samples that are kept: the first ones, at most KEPT."""
    outputs: list[list[np.ndarray]] = field(default_factory=list)
    """Outputs of the fp32 model on `feeds`, one list for each feed."""
    ranges: dict[str, ValueRange] = field(default_factory=dict)
    """Ranges of the observed values over all samples, by name."""
    seen: int = 0
    """Number of samples on which the model ran."""
    made_up: bool = True
    """True if the inputs were made up, not given by the caller."""
    empty: set[str] = field(default_factory=set)
    """Names of inputs that have no finite element in some sample, so that this sample adds nothing to their ranges."""
    problem: str = ""
    """The reason why no sample run succeeded; "" if one did."""
    invalid: str = ""
    """Error of onnx.checker on the model; "" if it passes. An error also sets `problem`, unless ONNX Runtime runs the model anyway."""
    refusal: str = ""
    """Error of ONNX Runtime on an invalid model; "" if the model runs or was not tried."""


# -- the caller's samples --------------------------------------------------------------
def read_feeds(model: ir.Model, calibration: Any) -> Iterator[Feed]:
    """Yield the caller's samples, each checked against the model's inputs when it is read.

    `calibration` is a sample or an iterable of samples. A sample is a mapping of input names to arrays, or the path of an .npz file. Raises
    PolicyError for anything else, for a file that cannot be read, and for a sample whose names, dtypes or shapes are not the model's.
    """
    if isinstance(calibration, Mapping | str | Path):
        calibration = (calibration,)
    elif not isinstance(calibration, Iterable) or isinstance(calibration, bytes | np.ndarray):
        raise PolicyError(f"calibration= takes {TAKES}, not {type(calibration).__name__}")
    return _each_checked(model, calibration)


def _each_checked(model: ir.Model, samples: Iterable[Any]) -> Iterator[Feed]:
    for index, sample in enumerate(_own_errors(samples)):
        where = f"calibration sample {index}"
        if isinstance(sample, str | Path):
            where, sample = f"calibration file {printable(sample)}", _read_npz(sample, [str(value.name) for value in model.graph.inputs])
        yield _checked(model, sample, where)


def _own_errors(samples: Iterable[Any]) -> Iterator[Any]:
    """Yield the caller's samples. An error that the caller's iterator raises is wrapped in a CallersError."""
    try:
        yield from samples
    except Exception as error:
        raise CallersError(error) from error


def _read_npz(path: str | Path, names: list[str]) -> Mapping[str, Any]:
    """Return {name: array} for an .npz file. If its names are not `names`, the model's inputs, return {name: None} instead.

    `_checked` refuses wrong names, so their arrays are not read: a small compressed file may unpack to gigabytes. Raises PolicyError if the
    file cannot be read as .npz, or if its arrays take more than half of the free memory.
    """
    try:
        if not Path(path).is_file() and Path(path).exists():
            raise ValueError("it is no regular file")
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds a bare array; save the inputs by name with numpy.savez")
        with archive:
            if set(archive.files) != set(names):
                return dict.fromkeys(archive.files)
            entries = archive.zip.infolist() if archive.zip is not None else []
            size = sum(entry.file_size for entry in entries)
            if size > memory() // 2:
                raise ValueError(f"its arrays take {size:.3g} bytes, more than half of the memory that is free")
            return dict(archive)
    except Exception as error:  # numpy, zipfile and zlib raise different errors for a damaged file
        raise PolicyError(f"calibration file {printable(path)} cannot be read as .npz: {one_line(error)}") from error


def _checked(model: ir.Model, sample: Any, where: str) -> Feed:
    """Return a sample as inputs for ONNX Runtime. Raises PolicyError if its names, dtypes or shapes are not the model's.

    `where` names the sample in messages.
    """
    inputs = {str(value.name): value for value in model.graph.inputs}
    if not isinstance(sample, Mapping):
        raise PolicyError(f"{where} is a {type(sample).__name__}; give a mapping with {', '.join(inputs)}")
    if set(sample) != set(inputs):
        given = ", ".join(map(str, sample)) or "nothing"
        raise PolicyError(f"{where} has {given}; the model's inputs are {', '.join(inputs)}")
    feed: Feed = {}
    for name, value in inputs.items():
        feed[name] = _checked_value(value, value.type, sample[name], f"{where}: {name}")
    return feed


def _checked_value(value: ir.Value, kind: ir.TypeProtocol | None, given: Any, where: str) -> Any:
    """Return `given` as an input of type `kind`: an array, a list of arrays for a sequence, or None for an optional.

    Raises PolicyError, with a message that begins with `where`, if `given` does not fit the type or the shape of `value`.
    """
    if isinstance(kind, ir.OptionalType):
        return None if given is None else _checked_value(value, kind.elem_type, given, where)
    if isinstance(kind, ir.SequenceType):
        if not isinstance(given, list | tuple):
            raise PolicyError(f"{where} is a {type(given).__name__}, the model wants a list of arrays")
        return [_checked_value(value, kind.elem_type, each, f"{where}[{index}]") for index, each in enumerate(given)]
    if given is None:
        raise PolicyError(f"{where} is None, the model wants an array")
    array = np.asarray(given)
    wanted = kind.dtype.numpy() if kind is not None else array.dtype
    if wanted.kind == "O" and array.dtype.kind == "U":
        array = array.astype(object)  # NumPy gave the strings a fixed width; ONNX Runtime takes strings as objects
    if array.dtype != wanted:
        raise PolicyError(f"{where} is {array.dtype}, the model wants {wanted}")
    dims = list(value.shape) if value.shape is not None else list(array.shape)
    if len(dims) != array.ndim or any(isinstance(d, int) and d != have for d, have in zip(dims, array.shape, strict=True)):
        shown = [dim if isinstance(dim, int) else str(dim.value or "any") for dim in dims]
        raise PolicyError(f"{where} has shape {list(array.shape)}, the model wants [{', '.join(map(str, shown))}]")
    return array


# -- made-up inputs -----------------------------------------------------------------
def made_up_feeds(model: ir.Model) -> Iterator[Feed]:
    """Yield made-up samples with different sizes for dims without a fixed size, likely sizes first. If all sizes are fixed, yield one."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for first, rest in SIZES:
        feed = _made_up(model, first, rest)
        shapes = tuple(np.shape(given) for given in feed.values())
        if shapes not in seen:
            seen.add(shapes)
            yield feed


def _made_up(model: ir.Model, first: int, rest: int) -> Feed:
    """Return made-up inputs. An open dim gets the size `first` if it is dim 0, otherwise `rest`. Open dims of one name get one size."""
    generator = np.random.default_rng(0)
    open_dims: dict[str, int] = {}
    feed: Feed = {}
    for value in model.graph.inputs:
        shape = []
        for place, dim in enumerate(value.shape if value.shape is not None else ()):
            size = first if place == 0 else rest
            shape.append(dim if isinstance(dim, int) else open_dims.setdefault(str(dim.value), size) if dim.value else size)
        made = _noise(value, tuple(shape), generator)
        kind = value.type.elem_type if isinstance(value.type, ir.OptionalType) else value.type
        feed[str(value.name)] = [made] if isinstance(kind, ir.SequenceType) else made
    return feed


def _noise(value: ir.Value, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    dtype = value.dtype.numpy() if value.dtype is not None else np.dtype(np.float32)
    if dtype.kind == "O":
        return np.full(shape, "a", dtype)
    if dtype.kind == "b":
        return np.ones(shape, dtype)
    if dtype.kind in "iu":
        rows = _rows_indexed(value)
        return generator.integers(0, rows, shape).astype(dtype) if rows else np.ones(shape, dtype)
    return generator.standard_normal(shape).astype(dtype)


def _rows_indexed(value: ir.Value) -> int:
    """Return the number of rows of the table that the integer input `value` indexes; 0 if it indexes no table of known size."""
    for node, place in value.uses():
        table = node.inputs[0]
        if node.op_type == "Gather" and place == 1 and table is not None and table.shape is not None:
            axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
            size = table.shape[axis]
            if isinstance(size, int):
                return size
    return 0


# -- runs ------------------------------------------------------------------------------
def observe(model: ir.Model, feeds: Iterable[Feed] | None, limit: TimeLimit = "auto", lenient: bool = False) -> Samples:
    """Run the fp32 model on `feeds` (None: on made-up inputs), and record the ranges of the fp32 values of its top graph.

    ONNX Runtime first infers the types and shapes that are still unknown, because it knows more ops than onnx. `limit` limits each run.

    A model that onnx.checker refuses is run only with `lenient`, and only if a trial in a separate process succeeds. Raises PolicyError if
    the model does not run on the caller's samples. If it does not run on made-up inputs, `problem` of the result is the reason.
    """
    problem = too_large(model)
    if problem:
        return Samples(problem=problem)
    with Runnable(model, limit) as runnable:
        invalid = runnable.invalid()
        if invalid:
            refused = Samples(problem=f"onnx.checker refuses the model: {invalid}", invalid=invalid)
            if not lenient:
                return refused
            feeds, tried = (feeds, list(made_up_feeds(model))) if feeds is None else _peek(feeds)
            failure = runnable.failure(tried)
            if failure:
                return replace(refused, refusal=failure)
        _fill_types(model, runnable)
        observer = _Observer(runnable, _fp32_values(model))
        if feeds is not None:
            samples = Samples(made_up=False, invalid=invalid)
            for feed in feeds:
                problem = observer.run(feed, samples)
                if problem:
                    raise PolicyError(f"the fp32 model does not run on the calibration data: {problem}")
            if not samples.seen:
                raise PolicyError("calibration= holds no sample; leave it out to run on made-up inputs")
            return samples
        samples = Samples(problem="its inputs are of unknown kind", invalid=invalid)
        for feed in made_up_feeds(model):
            samples.problem = observer.run(feed, samples)
            if not samples.problem or observer.too_slow:
                break
        return samples


def _peek(feeds: Iterable[Feed]) -> tuple[Iterable[Feed], list[Feed]]:
    """Return (an iterator over all of `feeds`, a list of the first feed). The list is empty if there is no feed."""
    rest = iter(feeds)
    first = list(itertools.islice(rest, 1))
    return itertools.chain(first, rest), first


def _fp32_values(model: ir.Model) -> list[ir.Value]:
    """Return the fp32 results of the nodes of the top graph, except constants."""
    made = (value for node in model.graph for value in node.outputs if value.name and constant_tensor(value) is None)
    return [value for value in made if format_of(value) == "fp32"]


def _fill_types(model: ir.Model, runnable: Runnable) -> None:
    """Let ONNX Runtime infer the types and shapes of values of unknown type. If ONNX Runtime cannot load the model, nothing changes.

    Results of If, Loop and Scan are left out: `read/reader.py` infers their types.
    """
    nodes = (node for node in model.graph if node.op_type not in FLOW)
    untyped = {str(value.name): value for node in nodes for value in node.outputs if value.name and value.type is None}
    if not untyped:
        return
    with contextlib.suppress(Exception):  # ignore errors: the next sample run reports why ONNX Runtime cannot load the model
        for found in runnable.session(untyped).get_outputs():
            kind = spelled_type(found.type)
            if found.name in untyped and kind is not None:
                guess(untyped[found.name], kind, ir.Shape(found.shape) if found.shape else None)


class _Observer:
    """Runs one model and records the ranges of its outputs and of the values `wanted`, in several runs if they are too large for one."""

    def __init__(self, runnable: Runnable, wanted: Iterable[ir.Value]) -> None:
        self.runnable, self.own = runnable, runnable.outputs
        self.chunks = [[str(value.name) for value in chunk if value.name not in self.own] for chunk in _chunks(wanted)]
        self.sessions: list[Any] = []
        self.too_slow = False
        """True if a run took longer than its time limit."""

    def run(self, feed: Feed, samples: Samples) -> str:
        """Run the model on one feed and record ranges, inputs and outputs in `samples`. Return the error; "" if there was none."""
        ranges: dict[str, ValueRange] = {}
        outputs: list[np.ndarray] = []
        try:
            self.sessions = self.sessions or [self.runnable.session(chunk) for chunk in self.chunks]
            for index, (chunk, runner) in enumerate(zip(self.chunks, self.sessions, strict=True)):
                names = [*chunk, *(self.own if index == 0 else ())]
                if not names:
                    continue
                found = run_within(runner, names, feed, self.runnable.seconds)
                outputs = outputs or found[len(chunk) :]
                ranges |= _ranges(dict(zip(names, found, strict=True)))
        except Exception as error:
            self.too_slow = isinstance(error, TooSlow)
            return one_line(error)
        ranges |= {} if samples.made_up else _ranges(feed)  # made-up inputs do not show the range of real inputs
        samples.ranges = merge(samples.ranges, ranges)
        samples.seen += 1
        samples.empty |= {name for name, given in feed.items() if isinstance(given, np.ndarray) and not has_numbers(given)}
        held = sum(_bytes(feed.values()) + _bytes(kept) for feed, kept in zip(samples.feeds, samples.outputs, strict=True))
        if not samples.feeds or (len(samples.feeds) < KEPT and held + _bytes(feed.values()) + _bytes(outputs) <= KEPT_BYTES):
            samples.feeds.append(feed)
            samples.outputs.append(outputs)
        return ""


def _ranges(arrays: Mapping[str, Any]) -> dict[str, ValueRange]:
    """Return the range of each fp32 array that has a finite element, by name."""
    held = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray) and array.dtype == np.float32}
    # torch refuses negative strides and warns of read-only arrays, so `require` copies both kinds
    found = {name: np.require(array, requirements=("C", "W")) for name, array in held.items() if has_numbers(array)}
    return {name: ValueRange.of(torch.from_numpy(array)) for name, array in found.items()}


def has_numbers(array: np.ndarray) -> bool:
    """True if an array has an element, and, for a floating dtype, a finite element."""
    return bool(np.isfinite(array).any() if array.dtype.kind == "f" else array.size)


def _bytes(arrays: Iterable[Any]) -> int:
    return sum(getattr(array, "nbytes", 0) for array in arrays)


def _chunks(wanted: Iterable[ir.Value]) -> Iterator[list[ir.Value]]:
    """Divide values into lists whose values have at most CHUNK elements together. A value with more elements gets a list of its own."""
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
    """Return the number of elements of a value. Open dims (dims without a fixed size) count as 64."""
    dims = (dim if isinstance(dim, int) else 64 for dim in (value.shape or ()))
    return int(np.prod([*dims, 1], dtype=np.int64))
