"""Write exported programs to `.pt2` files, and check that a `.pt2` file is data without code.

torch.export.load can run code from the file: it unpickles weights, constants and example inputs, evaluates expressions of sizes, imports
classes of containers, runs guards, and calls any function that a node names. Without --trust, a file is loaded only if none of this can
run code:

1. The file is an archive of only these parts: the program, weights and constants stored as bytes, and example inputs.
2. torch.load(weights_only=True) reads the example inputs, which runs no code.
3. All nodes call ATen ops or arithmetic. Sizes are numbers, names and arithmetic. Containers are tuples, lists and dicts.
4. The checked parts are copied into a new archive in memory, which is then loaded. So a change of the file after the check has no effect.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from amprewrite.tables.boundary.files import write_bytes
from amprewrite.tables.errors import one_line

PART = re.compile(
    r"models/model\.json|data/weights/(weight_\d+|model_weights_config\.json)|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|data/sample_inputs/model\.pt|archive_format|archive_version|byteorder|version|\.data/(version|serialization_id)|extra/[^/]+"
)
ARITHMETIC = "getitem|add|sub|mul|neg|floordiv|truediv|mod|eq|ne|lt|le|gt|ge|and_|or_"
TARGET = re.compile(rf"torch\.ops\.(aten|prims)\.\w+\.\w+|_operator\.({ARITHMETIC})")
FUNCTIONS = "Mul|Add|Integer|Rational|Max|Min|Mod|FloorDiv|CeilDiv|CleanDiv|PythonMod"
SIZE = re.compile(rf"(Symbol\('[a-z]+\d+'(, [a-z]+=(True|False))*\)|({FUNCTIONS})\(|[-\d(), ])*")
"""The expressions of sizes that are allowed: sympy's notation without powers, since loading would evaluate 9**9**9 for ever."""
CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")
"""Allowed types of containers for inputs and results."""
MOST_BYTES = 2**36
"""Largest total size, in bytes, of the parts of a file. A larger file is refused."""


class NotPlain(Exception):
    """Raised if loading a file may run code. The message is the reason."""


def plain_copy(path: Path) -> io.BytesIO:
    """Return a copy of a .pt2 file: an archive in memory that runs no code when it is loaded. Raises NotPlain if the file may run code.

    Raises OSError or an error of zipfile if the file cannot be read or is no archive.
    """
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        if sum(info.file_size for info in infos) > MOST_BYTES:
            raise NotPlain("its parts are too large to look at")
        parts: dict[str, bytes] = {}
        roots = {info.filename.partition("/")[0] for info in infos}
        for info in infos:
            name = info.filename.partition("/")[2]
            if len(roots) != 1 or not PART.fullmatch(name):
                raise NotPlain(f"it holds {info.filename!r}, which may be a pickle")
            if name in parts:
                raise NotPlain(f"it holds {info.filename!r} twice")
            if info.compress_type != zipfile.ZIP_STORED:
                raise NotPlain(f"{info.filename!r} is compressed")
            parts[name] = archive.read(info)
    for kind in ("weights", "constants"):
        config = _parsed(parts, f"data/{kind}/model_{kind}_config.json")
        if any(payload.get("use_pickle") is not False for payload in config["config"].values()):
            raise NotPlain(f"some of its {kind} are pickles")
    inputs = parts.get("data/sample_inputs/model.pt", b"")
    if inputs:
        try:
            torch.load(io.BytesIO(inputs), weights_only=True)
        except Exception as error:
            raise NotPlain(f"its example inputs are a pickle that asks for more than tensors ({one_line(error, 100)})") from error
    _check_program(_parsed(parts, "models/model.json"))
    return _archive(parts)


def save_program(program: torch.export.ExportedProgram, path: Any) -> None:
    """Write an exported program to `path`, completely or not at all. Raises EmitError if it cannot be written.

    The file is made in memory first, since torch's own writer aborts the process on a full disk.
    """
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    write_bytes(path, buffer.getvalue())


def _parsed(parts: dict[str, bytes], name: str) -> Any:
    try:
        return json.loads(parts[name])
    except KeyError as error:
        raise NotPlain(f"it has no {name}") from error


def _check_program(program: Any) -> None:
    if program.get("guards_code"):
        raise NotPlain("it holds guards, which are Python code")
    for key, value in _entries(program):
        if key == "target" and isinstance(value, str) and not TARGET.fullmatch(value):
            raise NotPlain(f"a node of it calls {value!r}, which is no ATen op")
        if key == "expr_str" and not (isinstance(value, str) and SIZE.fullmatch(value)):
            raise NotPlain(f"it holds the expression {value!r}")
        if key in ("in_spec", "out_spec") and isinstance(value, str) and value:
            for inner, word in _entries(json.loads(value)):
                if inner == "type" and word not in CONTAINERS:
                    raise NotPlain(f"its inputs or results hold a {word!r}")
        if key in ("custom_obj_values", "treespec_namedtuple_fields") and value:
            raise NotPlain("it holds objects of classes that it names")


def _entries(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of every object in the parsed JSON `data`, at any depth."""
    waiting = [data]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            yield from found.items()
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found


def _archive(parts: dict[str, bytes]) -> io.BytesIO:
    """Return an archive of the parts in the form that torch writes."""
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer)
    for name, content in parts.items():
        if name not in ("version", "byteorder") and not name.startswith(".data/"):  # torch's writer adds these records itself
            writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    buffer.seek(0)
    return buffer
