"""Write an ONNX model and its weights so that a reader finds the old pair or the new pair, never a mix.

1. Weights outside the model are written to a data file named by its content, `NAME.onnx.HASH.data`. This file never changes.
2. Model, data and plan are written and synced in a scratch folder next to the target, and checked there.
3. The data file moves into place, then the model, then the plan. A reader of the new model finds the new data, because the model names its
   data file. A plan in place is never newer than the model.
4. If a move fails or is interrupted, all moves so far are undone. After the last move, data files that only the old model read are removed.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import hashlib
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from amprewrite.graphs.onnx.ops import describe, tensors_of, to_proto
from amprewrite.graphs.onnx.run.onnx_runtime import is_large
from amprewrite.tables.boundary.files import (
    alone_in,
    cannot_write,
    resolved,
    scratch_folder,
    scratch_path,
    sweep,
    sync_file,
    sync_folder,
    take_mode,
)
from amprewrite.tables.boundary.files import write_scratch as write
from amprewrite.tables.errors import EmitError, one_line

SMALL = 256
"""Weights of at most this many bytes stay inside the model when other weights are in a data file."""
HASH = 16
"""Number of hex digits of the hash in the name of a data file."""


@dataclass(frozen=True)
class Written:
    """A model that was written to files in a scratch folder. `keep` moves the files to their final path."""

    path: Path
    target: Path | None
    """Path to which `keep` moves the model; None for a model that is only checked."""
    proto: onnx.ModelProto
    """The model, without its weights if they are outside."""
    data: Path | None
    """The file with the model's weights; None if they are inside the model."""

    @property
    def outside(self) -> bool:
        """True if weights are in a separate file."""
        return self.data is not None

    def keep(self, texts: Mapping[Path, str]) -> None:
        """Move model and data file to `target`, and write `texts`, {path: text}. If a move fails, restore old files and raise EmitError."""
        assert self.target is not None
        real, scratch = resolved(self.target), []
        plans = {resolved(path): text for path, text in texts.items()}
        try:
            for path in (self.path, *([self.data] if self.data else ())):
                sync_file(path)
            for target, text in plans.items():
                sweep(target.parent)
                scratch.append(scratch_path(target.parent))
                write(scratch[-1], text.encode("utf-8", errors="backslashreplace"))
                sync_file(scratch[-1])
            with alone_in(real.parent):
                old = _old_data(real)
                take_mode(self.path, real)
                moves = [(self.path, real)]
                if self.data and not _is_there(self.data, real.with_name(self.data.name)):
                    self.data.chmod((old[0] if old else self.path).stat().st_mode & 0o7777)
                    moves.insert(0, (self.data, real.with_name(self.data.name)))
                for source, target in zip(scratch, plans, strict=True):
                    take_mode(source, target)
                    moves.append((source, target))
                _move_all(moves, self.path.parent)
                _remove(old, real, self.data.name if self.data else "")
            for folder in {real.parent, *(target.parent for target in plans)}:
                sync_folder(folder)
        except OSError as error:
            raise EmitError(f"{self.target} cannot be replaced: {one_line(error)}; give another path") from error
        finally:
            for path in scratch:
                path.unlink(missing_ok=True)


def _is_there(data: Path, target: Path) -> bool:
    """True if `target` is a file with the content of `data`, and no link. Such a file is not replaced, as a reader may have it open."""
    return target.is_file() and not target.is_symlink() and filecmp.cmp(data, target, shallow=False)


def _move_all(moves: list[tuple[Path, Path]], scratch: Path) -> None:
    """Move files to their targets, given as (source, target) pairs. If a move fails, or the user interrupts, restore the old files.

    The folder `scratch` holds the old files until all moves are done.
    """
    undo: list[tuple[Path, Path | None]] = []
    try:
        for number, (source, target) in enumerate(moves):
            before = scratch / f"{number}.before" if target.exists() else None
            if before is not None:
                _link(target, before)
            undo.append((target, before))  # record the move before making it, so that it is undone even if an interrupt follows at once
            source.replace(target)
    except BaseException:
        for target, before in reversed(undo):
            if before is None:
                target.unlink(missing_ok=True)
            else:
                _put_back(before, target)
        raise


def _put_back(before: Path, target: Path) -> None:
    """Replace `target` by the file `before`, also if they are on different disks."""
    try:
        before.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        beside = scratch_path(target.parent)
        shutil.copy2(before, beside)
        beside.replace(target)


def _link(source: Path, target: Path) -> None:
    """Make `target` a hard link to the file `source`, or a copy if no link can be made."""
    try:
        os.link(source, target)
    except OSError:  # the two paths are on different disks, or the file system has no links
        shutil.copy2(source, target)


# -- data files that are no longer read --------------------------------------------------
def _old_data(model: Path) -> list[Path]:
    """Return the files next to the file `model` in which earlier rewrites stored weights of this model.

    For a model `m.onnx` these are the files `m.onnx.<hash>.data`, and `m.onnx.data` if the model reads it.
    """
    ours = re.compile(rf"{re.escape(model.name)}\.[0-9a-f]{{{HASH}}}\.data")
    found = [path for path in model.parent.iterdir() if ours.fullmatch(path.name) and path.is_file()]
    plain = model.with_name(f"{model.name}.data")
    if plain.is_file() and not plain.is_symlink() and _mentions(model, plain.name):
        found.append(plain)
    return found


def _remove(old: list[Path], model: Path, kept: str) -> None:
    """Remove each data file in `old`, unless it is called `kept`, or another file in the folder of `model` contains its name."""
    gone = [path for path in old if path.name != kept]
    if not gone:
        return
    others = [path for path in model.parent.iterdir() if path != model and path.suffix != ".data" and path.is_file()]
    for path in gone:
        if not any(_mentions(other, path.name) for other in others):
            with contextlib.suppress(OSError):  # ignore errors: the new model is in place, and a leftover data file does no harm
                path.unlink()


def _mentions(path: Path, name: str) -> bool:
    """True if a file contains the text `name`; also if it cannot be read, so that no needed data file is removed."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(name.encode()) >= 0
    except ValueError:  # mmap refuses an empty file
        return False
    except OSError:
        return path.exists()


# -- scratch files ---------------------------------------------------------------------------
@contextlib.contextmanager
def written(model: ir.Model, target: Path | None, external_data: bool | str) -> Iterator[Written]:
    """Context manager that writes the model to files in a scratch folder, and removes the folder on exit.

    Inside the block, `Written.keep` moves the files to `target` (None for a model that is only checked). If `external_data` is True,
    weights are written outside the model; if "auto", only if they do not fit one protobuf. Raises EmitError if a file cannot be written.
    """
    outside = is_large(model) if external_data == "auto" else bool(external_data)
    shown = target or Path(tempfile.gettempdir()) / "model.onnx"
    if is_large(model) and not outside:
        raise EmitError(f"{shown} cannot be written: its weights do not fit one file; leave external_data= out")
    real = resolved(shown)
    if target is not None and outside and real.parent != Path(os.path.realpath(target.parent)):
        raise EmitError(
            f"{target} is a link into another folder, and weights outside a model are searched for in the folder of the link; "
            f"name {real} itself, or pass external_data=False"
        )
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(scratch_folder(real.parent)) / real.name
        except OSError as error:
            raise cannot_write(shown, error) from error
        try:
            proto, data = _save_outside(model, made) if outside else (to_proto(model), None)
            write(made, proto.SerializeToString())
        except (OSError, ValueError) as error:
            raise EmitError(f"{shown} cannot be written: {one_line(error)}; free some space or give another path") from error
        yield Written(made, target, proto, data)


def _save_outside(model: ir.Model, made: Path) -> tuple[onnx.ModelProto, Path | None]:
    """Write large weights to a data file next to `made`. Return (model without them, path of the data file; None if no weight is large)."""
    first = made.with_name("weights.data")
    held = [(value, value.const_value) for graph in model.graphs() for value in graph.initializers.values()]
    try:
        ir.external_data.unload_from_model(model, made.parent, first.name, size_threshold_bytes=SMALL)
        for value, tensor in held:
            if value.const_value is not None and tensor is not None and value.const_value is not tensor:
                describe(value.const_value, tensor)
        proto = to_proto(model)
    finally:
        for value, tensor in held:
            value.const_value = tensor
    if not first.exists():  # no data file was written: all weights are small enough to stay in the model file
        return proto, None
    with first.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=HASH // 2)).hexdigest()
    data = first.rename(made.with_name(f"{made.name}.{digest}.data"))
    for tensor in tensors_of(proto.graph):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = data.name
    return proto, data
