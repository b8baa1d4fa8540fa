"""Run models of any size in ONNX Runtime: from memory if the model fits one protobuf, otherwise from files in a temporary folder.

This file has special code for `Transpose`, on which ONNX Runtime may crash.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import onnx
import onnx_ir as ir

from amprewrite.graphs.onnx.check import invalid
from amprewrite.graphs.onnx.ops import format_of, to_proto, without_guesses
from amprewrite.graphs.onnx.run import trial
from amprewrite.tables.boundary.files import cannot_write, scratch_folder, write_scratch
from amprewrite.tables.errors import EmitError, one_line
from amprewrite.tables.formats import LOW_NAMES

MOST_BYTES = 1_500_000_000
"""A model with more bytes of weights is run from a file with external data, because one protobuf holds at most 2 GB."""
SECONDS = 5.0
"""Time limit of a run in seconds, if the model has no weights."""
BYTES_A_SECOND = 2e7
"""The time limit of a run grows by one second for this many bytes of weights."""
TimeLimit = float | None | Literal["auto"]
"""Seconds that one run may take. None means no limit; "auto" derives the limit from the bytes of weights."""
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
"""ONNX Runtime's names of the optimisation levels 0 to 3."""
NO_RUNTIME = (
    "ONNX Runtime is not installed, so nothing can be run or verified: pip install 'amprewrite[onnx]' for the CPU, "
    "'amprewrite[onnx-gpu]' for CUDA; verify=False goes without"
)


def runtime() -> Any:
    """Return the onnxruntime module. Raises EmitError with the install lines for CPU and GPU if it is not installed."""
    try:
        import onnxruntime
    except ImportError as error:
        raise EmitError(NO_RUNTIME) from error
    return onnxruntime


def has_runtime() -> bool:
    """True if ONNX Runtime is installed."""
    try:
        runtime()
    except EmitError:
        return False
    return True


def session(model: onnx.ModelProto | bytes | str, level: int | None = None) -> Any:
    """Return a session on CUDA if available, otherwise on the CPU. `level` is the optimisation level, 0 to 3; None means the default, 3.

    `model` is a protobuf, its bytes, or a path.
    """
    ort = runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if level is not None:
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[level])
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    return ort.InferenceSession(source, options, providers=providers())


def providers() -> list[str]:
    """Return the execution providers of sessions, in order of preference: CUDA if available, then CPU."""
    known = runtime().get_available_providers()
    return [p for p in ("CUDAExecutionProvider", "CPUExecutionProvider") if p in known]


class TooSlow(EmitError):
    """Raised when a run takes longer than its time limit."""


def seconds_for(weights: int, limit: TimeLimit = "auto") -> float | None:
    """Return the seconds that one run may take; None if there is no limit.

    `weights` is the number of bytes of the weights. The limit "auto" grows with it, so that a small model cannot block for long.
    """
    return SECONDS + weights / BYTES_A_SECOND if limit == "auto" else limit


def run_within(runner: Any, names: list[str] | None, feed: Any, seconds: float | None) -> list[Any]:
    """Run the session `runner` on the inputs `feed`. Return the outputs called `names`, or all outputs if `names` is None.

    Raises TooSlow if the run takes longer than `seconds` (None: no limit). Errors of ONNX Runtime pass through.
    """
    options = runtime().RunOptions()
    options.log_severity_level = 4
    if seconds is None:
        unlimited: list[Any] = runner.run(names, feed, options)
        return unlimited
    late = threading.Event()

    def stop() -> None:
        late.set()
        options.terminate = True

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        found: list[Any] = runner.run(names, feed, options)
    except Exception as error:
        if late.is_set():
            raise TooSlow(f"one run takes longer than {seconds:g} s; time_limit= (--time-limit) allows more") from error
        raise
    finally:
        timer.cancel()
    return found


def weight_bytes(model: ir.Model) -> int:
    """Return the number of bytes of all initialisers."""
    return sum(v.const_value.nbytes for g in model.graphs() for v in g.initializers.values() if v.const_value is not None)


def is_large(model: ir.Model) -> bool:
    """True if the weights have more than MOST_BYTES, so that the model does not fit one protobuf."""
    return weight_bytes(model) > MOST_BYTES


def may_crash(model: ir.Model) -> bool:
    """True if ONNX Runtime's optimiser may crash the process (segmentation fault, seen in 1.31) when it loads the model.

    It may crash if a Transpose has a low result, which a matrix product reads through a cast to fp32. On a CPU all products read fp32, so
    the answer is True for any Transpose with a low result.
    """
    transposes = (node for node in model.graph.all_nodes() if node.op_type == "Transpose" and not node.domain)
    return any(format_of(node.outputs[0]) in LOW_NAMES for node in transposes)


class Runnable:
    """A model that ONNX Runtime can run with any of its values as outputs.

    Use it as a context manager, since it keeps a large model in a temporary folder.
    """

    def __init__(self, model: ir.Model, limit: TimeLimit = "auto") -> None:
        self.seconds = seconds_for(weight_bytes(model), limit)
        """Seconds that one run may take; None if there is no limit."""
        self.stack = contextlib.ExitStack()
        self.folder: Path | None = None
        if not is_large(model):
            self.proto = to_proto(model)
            return
        temporary = Path(tempfile.gettempdir())
        try:
            self.folder = self.stack.enter_context(scratch_folder(temporary))
            path = self.folder / "model.onnx"
            with without_guesses(model):
                ir.save(model, path, external_data="model.data")
            self.proto = onnx.load(str(path), load_external_data=False)
        except OSError as error:
            self.stack.close()
            raise cannot_write(temporary / "model.onnx", error) from error

    def __enter__(self) -> Runnable:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    @property
    def outputs(self) -> list[str]:
        """The names of the model's own outputs."""
        return [value.name for value in self.proto.graph.output]

    def invalid(self) -> str:
        """Return the error of onnx.checker on the model; "" if the model passes."""
        return invalid(self.proto if self.folder is None else self.folder / "model.onnx")

    def failure(self, feeds: Iterable[dict[str, Any]]) -> str:
        """Try the model in a separate process. Return "" if ONNX Runtime loads it and runs it on one of `feeds`, otherwise the error."""
        if not has_runtime():
            return NO_RUNTIME
        model = self.proto.SerializeToString() if self.folder is None else str(self.folder / "model.onnx")
        said = trial.failure(model, list(feeds), providers(), self.seconds)
        return one_line(said) if said else ""

    def session(self, extra: Iterable[str] = ()) -> Any:
        """Return a session without optimisations, whose outputs are the model's outputs and then the values called `extra`."""
        return session_of(self.proto, self.folder, extra)


def refusal(model: ir.Model) -> str:
    """Return the error of ONNX Runtime on loading a model, for example about an op without a kernel.

    The result is "" if ONNX Runtime loads the model, or is not installed.
    """
    if not has_runtime():
        return ""
    with Runnable(model) as runnable:
        try:
            runnable.session()
        except Exception as error:
            return one_line(error)
    return ""


def session_of(proto: onnx.ModelProto, folder: Path | None = None, extra: Iterable[str] = ()) -> Any:
    """Return a session of `proto` without optimisations, with the values called `extra` as further outputs.

    `folder` holds the external data of `proto`; None if there is none.
    """
    own = len(proto.graph.output)
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in extra)
    try:
        if folder is None:
            return session(proto, 0)
        path = folder / "variant.onnx"
        write_scratch(path, proto.SerializeToString())
        try:
            return session(str(path), 0)
        finally:
            path.unlink()
    finally:
        del proto.graph.output[own:]
