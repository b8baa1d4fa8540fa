"""Log the loss scale and skipped steps of a training run, as JSON lines and as TensorBoard scalars."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch import nn

from amprewrite.runtime.model.rewritten import RewrittenBase, session_of
from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.boundary.files import cannot_write
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.errors import EmitError, PolicyError


class ScalarWriter(Protocol):
    """An object to which TrainingLog can write scalars, such as torch.utils.tensorboard.SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class TrainingLog:
    """Writes a record at every `every`-th call of `step`: loss scale, steps, skipped steps, and where the last overflow began.

    Each record is a line of JSON appended to the file `path`, and three scalars in `writer` (a TensorBoard SummaryWriter, or any object
    with add_scalar). Making a record copies the scale to the host, which waits for the device; raise `every` if this is too slow. Use the
    log as a context manager, or call `close` at the end.

    Raises PolicyError if `amp` is not rewritten, neither `path` nor `writer` is given, or `every` is no positive integer. Raises EmitError
    if `path` cannot be written.
    """

    def __init__(self, amp: nn.Module, path: str | Path | None = None, *, writer: ScalarWriter | None = None, every: int = 1) -> None:
        if not isinstance(amp, RewrittenBase):
            raise PolicyError(f"TrainingLog takes a rewritten model, not {type(amp).__name__}; pass what amprewrite.rewrite returned")
        if path is None and writer is None:
            raise PolicyError("TrainingLog has nothing to write to; give a path, or writer=SummaryWriter(...)")
        if not isinstance(every, int) or every < 1:
            raise PolicyError(f"every={shown(every)} counts steps; give a whole number, at least 1")
        self._scale, self._writer, self._every, self._calls = session_of(amp).training.loss_scale, writer, every, 0
        self._path = path
        self._file = None if path is None else _opened(path)

    def step(self, **more: float | str | None) -> dict[str, Any] | None:
        """Count one training step; call this method after `optimizer.step()`. Return the record if this step writes one, otherwise None.

        `more` adds entries to the record.
        """
        self._calls += 1
        if self._calls % self._every:
            return None
        report = self._scale.report()
        record: dict[str, Any] = {
            "step": self._calls,
            "scale": report.scale,
            "steps": report.steps,
            "skipped": report.skipped,
            "consecutive_skips": report.consecutive_skips,
            "overflow_in": report.overflow_at,
            **more,
        }
        if self._file is not None:
            _append(self._file, json.dumps(record), self._path)
        if self._writer is not None:
            for tag in ("scale", "skipped", "consecutive_skips"):
                self._writer.add_scalar(f"loss_scale/{tag}", float(record[tag]), self._calls)
        return record

    def close(self) -> None:
        """Close the file at `path`. The writer stays open."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> TrainingLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _opened(path: str | Path) -> io.FileIO:
    """Open a file for appending and return it. If its last line has no line end (a process was killed), write the line end first."""
    try:
        file = io.FileIO(path, "a+")
    except (OSError, ValueError) as error:
        raise _cannot_write(path, error) from error
    if file.seekable() and file.seek(0, io.SEEK_END):
        file.seek(-1, io.SEEK_END)
        if file.read(1) != b"\n":
            _append(file, "", path)
    return file


def _append(file: io.FileIO, line: str, path: Any) -> None:
    """Write one whole line without a buffer, so that a killed process loses no record. Raises EmitError if writing fails."""
    content = f"{line}\n".encode()
    try:
        while content:
            content = content[file.write(content) :]
    except (OSError, ValueError) as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Any, error: Exception) -> EmitError:
    if isinstance(error, OSError):
        return cannot_write(path, error)
    return EmitError(f"{printable(path)} cannot be written: {error}; give another path")
