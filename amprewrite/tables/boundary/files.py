"""Functions to read files, and to write them as a whole or not at all, even if the process is interrupted.

1. The content is written to a scratch file next to the target and synced to the disk.
2. The scratch file gets the target's mode and owner and replaces it in one step; then the folder is synced.
3. A symbolic link is followed: its target is replaced, and the link stays. Folders, devices, pipes and sockets are refused.
4. A killed process leaves its scratch file behind. The next write in that folder removes it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.errors import EmitError, PolicyError

try:
    import fcntl
except ImportError:  # Windows lacks this module: there `alone_in` locks nothing
    fcntl = None  # type: ignore[assignment]

MARK = ".amprewrite-"
"""Beginning of the names of scratch files. The rest is: machine, process id, start time of the process, a random word."""
HOUR = 3600.0
"""Age in seconds at which a scratch file of another machine counts as left over."""
PATIENCE = 10.0
"""Seconds that `alone_in` waits for another writer in the same folder."""
REMEDIES = {
    errno.ENOSPC: "free some space or give another path",
    errno.EDQUOT: "free some space or give another path",
    errno.EFBIG: "free some space or give another path",
    errno.EACCES: "give another path, in a folder that you may write to",
    errno.EPERM: "give another path, in a folder that you may write to",
    errno.EROFS: "give another path, on a disk that is not read-only",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOENT: "make the folder first",
    errno.ENOTDIR: "make the folder first",
    errno.ELOOP: "remove the symbolic link that leads to itself",
}


# -- writing ---------------------------------------------------------------------------
def write_text(path: Any, text: str) -> Path:
    """Write a UTF-8 text file, new or in place of an old file, and return its path.

    Raises EmitError, with reason and remedy, if the file cannot be written.
    """
    return write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_bytes(path: Any, content: bytes) -> Path:
    """Write a file, new or in place of an old file, and return its path.

    Raises EmitError, with reason and remedy, if the file cannot be written.
    """
    with replacing(path) as file:
        file.write(content)
    return Path(path)


@contextlib.contextmanager
def replacing(path: Any) -> Iterator[BinaryIO]:
    """Yield a new binary file, which replaces the file at `path` when the `with` block ends.

    If the block raises an exception, the old file is unchanged. Raises EmitError if the file cannot be written, or if the block raises
    OSError. Other exceptions of the block pass through.
    """
    target = resolved(path)
    try:
        sweep(target.parent)
        scratch = scratch_path(target.parent)
        handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                take_mode(scratch, target)  # set the mode before writing: only users who could read the old file can read the new file
                yield file
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)
        sync_folder(target.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def read_text(path: Any) -> str:
    """Return the text of a UTF-8 file. Raises ValueError, with the reason, if it cannot be read or is no UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ValueError(f"{error.strerror or error}") from error


def cannot_write(path: Any, error: OSError) -> EmitError:
    """Return the EmitError, with reason and remedy, for an `error` that occurred while `path` was written."""
    remedy = REMEDIES.get(error.errno or 0, "give another path")
    if error.errno == errno.ENOENT and Path(path).parent.is_dir():
        remedy = "give another path"
    return EmitError(f"{printable(path)} cannot be written: {printable(error.strerror or error)}; {remedy}")


# -- targets -----------------------------------------------------------------------------
def resolved(path: Any) -> Path:
    """Return the path of the regular file that `path` names, with symbolic links followed. The file need not exist yet.

    Raises PolicyError if `path` is no path, and EmitError if its folder is missing or the thing at `path` cannot be replaced by a file.
    """
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise PolicyError(f"a path is a string or a Path, not {type(path).__name__}")
    if not os.fspath(path):
        raise EmitError("'' names no file; give a path")
    if "\0" in os.fspath(path):
        raise EmitError(f"{printable(path)} cannot be written: a path holds no NUL character; give another path")
    try:
        target = Path(os.path.realpath(path))
        if not stat.S_ISDIR(target.parent.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        found = target.lstat()
    except FileNotFoundError as error:
        if Path(os.path.realpath(path)).parent.is_dir():
            return target
        raise cannot_write(path, error) from error
    except UnicodeEncodeError as error:
        raise EmitError(f"{printable(path)} cannot be written: the file system takes no such name; give another path") from error
    except OSError as error:
        raise cannot_write(path, error) from error
    if stat.S_ISDIR(found.st_mode):
        raise EmitError(f"{printable(path)} is a folder; name a file in it")
    if stat.S_ISLNK(found.st_mode):
        raise cannot_write(path, OSError(errno.ELOOP, os.strerror(errno.ELOOP)))
    if not stat.S_ISREG(found.st_mode):
        raise EmitError(f"{printable(path)} cannot be written: it is a device, a pipe or a socket; name a regular file")
    if not os.access(target, os.W_OK):
        raise EmitError(f"{printable(path)} cannot be written: it is read-only; make it writable or give another path")
    return target


def take_mode(scratch: Path, target: Path) -> None:
    """Give a scratch file the mode and owner of the file that it will replace, if there is one."""
    try:
        old = target.stat()
    except FileNotFoundError:
        return
    now = scratch.stat()
    if hasattr(os, "chown") and (old.st_uid, old.st_gid) != (now.st_uid, now.st_gid):
        with contextlib.suppress(PermissionError):  # only root may change the owner: the new file of any other user belongs to that user
            os.chown(scratch, old.st_uid, old.st_gid)
    scratch.chmod(stat.S_IMODE(old.st_mode))


def write_scratch(path: Path, content: bytes) -> None:
    """Write `content` to a scratch file, without a sync to the disk (see `sync_file`). Raises OSError if writing fails."""
    with path.open("wb") as file:
        file.write(content)


def sync_file(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the disk. Do nothing if the file system cannot sync folders."""
    with contextlib.suppress(OSError), _opened(folder) as handle:  # ignore errors: the files in the folder are complete without this sync
        os.fsync(handle)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock `folder` during the `with` block: other threads and processes wait at their blocks. Raises EmitError after PATIENCE seconds.

    On Windows, and on file systems without locks, nothing is locked.
    """
    if fcntl is None:
        yield
        return
    with _opened(folder) as handle:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise EmitError(f"{folder} is in use by another writer; try again when it is done") from None
                time.sleep(0.005)
            except OSError:  # a file system without locks: go on without one
                break
        try:
            yield
        finally:  # unlock explicitly: if a process was forked in the meantime, its copy of the handle would keep the lock after a close
            with contextlib.suppress(OSError):  # a file system without locks cannot unlock either
                fcntl.flock(handle, fcntl.LOCK_UN)


# -- scratch files -----------------------------------------------------------------------
def scratch_path(folder: Path) -> Path:
    """Return a new path in `folder` whose name identifies this process. The name is short, since file systems limit the length of names."""
    pid = os.getpid()
    return folder / f"{MARK}{_place()}-{pid}-{_started(pid)}-{secrets.token_hex(4)}"


@contextlib.contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Make a new folder inside `folder`, yield its path, and remove it after the `with` block. Raises OSError if it cannot be made."""
    sweep(folder)
    made = scratch_path(folder)
    try:
        made.mkdir(0o700)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove the scratch files that killed processes left in `folder`. Do nothing if the folder cannot be read."""
    try:
        with os.scandir(folder) as entries:
            found = [Path(entry.path) for entry in entries if entry.name.startswith(MARK)]
    except OSError:
        return
    for path in found:
        if _is_left_over(path):
            with contextlib.suppress(OSError):  # another process may have removed the path in the meantime
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()


def _is_left_over(path: Path) -> bool:
    """True if the process that made a scratch file has ended. If it ran on another machine: True if the file is over an hour old."""
    parts = path.name.removeprefix(MARK).split("-")
    if len(parts) != 4 or not parts[1].isdigit():
        return False
    if parts[0] == _place():
        return _started(int(parts[1])) != parts[2]
    try:
        inside = [each.lstat().st_mtime for each in path.iterdir()] if path.is_dir() and not path.is_symlink() else []
        return time.time() - max([path.lstat().st_mtime, *inside]) > HOUR
    except OSError:
        return False


def _place() -> str:
    """Return a short hash of host name, boot id and process-id namespace. Process ids can be compared only if this hash is the same."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # only Linux has these files
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), str(Path("/proc/self/ns/pid").readlink())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def _started(pid: int) -> str:
    """Return the start time of a process as text, to distinguish it from a later process with the same id.

    "gone" if no such process runs; "0" if it runs but its start time is unknown.
    """
    if Path("/proc/self/stat").exists():
        try:
            told = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            return "gone" if told[0] in "ZX" else told[19]  # Z and X: the process has ended, but its parent has not collected it yet
        except (OSError, IndexError):
            return "gone"
    if os.name == "nt":  # on Windows `os.kill(pid, 0)` sends Ctrl+C, so it is no test
        return "0"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except OSError:  # the process runs, but belongs to another user
        return "0"
    return "0"
