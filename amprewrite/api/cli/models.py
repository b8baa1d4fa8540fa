"""Load the MODEL that an argument of the command line names: a factory, a `.pt2` file, an `.onnx` file, or a saved plan.

A factory is a Python callable without arguments that returns a model and inputs. Its code runs, because the user names it.
`.onnx` and `.json` files are data.

torch.export.load can run code from a `.pt2` file: it unpickles weights, constants and example inputs, evaluates expressions of sizes,
imports classes of containers, runs guards, and calls any function that a node names. Without --trust, a file is loaded only if none of
this can run code:

1. The file is an archive of only these parts: the program, weights and constants stored as bytes, and example inputs.
2. torch.load(weights_only=True) reads the example inputs, which runs no code.
3. All nodes call ATen ops or arithmetic. Sizes are numbers, names and arithmetic. Containers are tuples, lists and dicts.
4. The checked parts are copied into a new archive in memory, which is then loaded. So a change of the file after the check has no effect.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import json
import re
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from amprewrite.report.cast_plan import CastPlan
from amprewrite.tables.boundary.arguments import did_you_mean
from amprewrite.tables.boundary.files import read_text, write_bytes
from amprewrite.tables.errors import AmpRewriteError, one_line
from amprewrite.torch_internals.trees import tree_map

HOW = "name a model as package.module:callable, file.py:callable, a .pt2 or an .onnx file"
RETURNS = "return (module, inputs) or (module, args, kwargs): inputs is a tuple of arguments, a dict of keywords, or one tensor"


class UsageError(AmpRewriteError):
    """Raised for a wrong command line, or for a name in it that does not exist."""


@dataclass
class TorchModel:
    """A PyTorch model with example inputs."""

    name: str
    model: Any
    """An nn.Module or an ExportedProgram."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def to(self, device: str) -> TorchModel:
        """Return the model and its inputs moved to `device`. Raises UsageError if they cannot be moved."""

        def move(leaf: Any) -> Any:
            return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

        if not isinstance(self.model, nn.Module):
            raise UsageError(f"{self.name} was exported for its device; --run-on moves models made by a callable")
        try:
            return TorchModel(self.name, self.model.to(device), tree_map(move, self.args), tree_map(move, self.kwargs))
        except (RuntimeError, AssertionError) as error:
            raise UsageError(f"--run-on {device}: {first_line(error)}; name a device that is here, such as cpu or cuda:0") from error


@dataclass(frozen=True)
class OnnxModel:
    """The path of an ONNX file, which is not read yet."""

    path: Path


Source = TorchModel | OnnxModel | CastPlan


def load(word: str, trust: bool = False) -> Source:
    """Load what `word` names: read a file, or call a function. `trust` lets a .pt2 file run code. Raises UsageError if loading fails."""
    path = Path(word)
    if path.suffix in (".onnx", ".pt2", ".json"):
        if not path.is_file():
            raise UsageError(f"there is no file {word}; {HOW}")
        if path.suffix == ".pt2":
            return _load_pt2(path, trust)
        return OnnxModel(path) if path.suffix == ".onnx" else load_plan(path)
    place, colon, name = word.rpartition(":")
    if not colon or not place or not name:
        what = f"{word} is a file of a kind that is not read" if path.exists() else f"{word!r} names no model"
        raise UsageError(f"{what}; {HOW}")
    return _checked(word, name, _called(word, place, name, RETURNS))


def load_plan(path: Path) -> CastPlan:
    """Return the plan in a file that `amprewrite plan --json` or `to_json` wrote. Raises UsageError if the file holds no plan."""
    try:
        return CastPlan.from_json(read_text(path))
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from error
    except AmpRewriteError as error:
        raise UsageError(f"{path}: {error}") from error


def _load_pt2(path: Path, trust: bool) -> TorchModel:
    try:
        program = torch.export.load(path if trust else plain_copy(path))
    except NotPlain as error:
        raise UsageError(f"{path} may run code when it is loaded: {error}; pass --trust if you trust its author") from error
    except Exception as error:
        what = f"{path} is no exported program, or a damaged one: {first_line(error)}"
        raise UsageError(f"{what}; write it with torch.export.save") from error
    if program.example_inputs is None:
        raise UsageError(f"{path} holds no example inputs; save the program that torch.export.export gave")
    args, kwargs = program.example_inputs
    return TorchModel(path.stem, program, tuple(args), dict(kwargs))


def load_batches(word: str) -> Iterable[Any]:
    """Call the callable that `word` names and return its batches, such as a DataLoader.

    Raises UsageError if there is no such callable, it raises, or it returns no iterable of batches.
    """
    place, colon, name = word.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{word!r} names no batches; name them as package.module:callable or file.py:callable")
    found = _called(word, place, name, "return an iterable of batches")
    if not isinstance(found, Iterable) or isinstance(found, torch.Tensor | str | Mapping):
        raise UsageError(f"{word} returned {_a(type(found).__name__)}; it should return an iterable of batches, such as a list")
    return found


# -- loading by calling a factory ---------------------------------------------------------
def _called(word: str, place: str, name: str, returns: str) -> Any:
    factory = _attribute(_module(word, place), place, name)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise UsageError(f"{word} is {_a(type(factory).__name__)}, no function to call; it should {returns}")
    missing = _missing(factory)
    if missing:
        raise UsageError(f"{word} needs arguments ({', '.join(missing)}); name a callable that takes none")
    try:
        return factory()
    except (Exception, SystemExit) as error:  # SystemExit is no Exception. If not caught, it would end this command with the model's status
        raise UsageError(f"{word} raised {type(error).__name__}: {first_line(error)}{_where(error)}") from error


def _module(word: str, place: str) -> ModuleType:
    if place.endswith(".py"):
        path = Path(place)
        spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
        if spec is None or spec.loader is None:
            raise UsageError(f"{word}: there is no file {place}")
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)

        def found() -> ModuleType:
            assert spec.loader is not None
            sys.path.insert(0, str(path.parent.absolute()))
            spec.loader.exec_module(module)
            return module

        return _imported(word, place, found)
    if not all(part.isidentifier() for part in place.split(".")):
        raise UsageError(f"{word}: {place!r} is no module name; {HOW}")
    sys.path.insert(0, str(Path.cwd()))
    return _imported(word, place, lambda: importlib.import_module(place))


def _imported(word: str, place: str, how: Callable[[], ModuleType]) -> ModuleType:
    try:
        return how()
    except ModuleNotFoundError as error:
        top = place.split(".")[0]
        own = error.name is not None and (error.name == place or place.startswith(f"{error.name}."))
        hint = f"there is no module {error.name} here or installed" if own else f"it imports {error.name}, which is not installed"
        raise UsageError(f"{word}: {hint}{'' if own else f' (imported by {top})'}; the folder you stand in is searched first") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"{word}: importing {place} raised {type(error).__name__}: {first_line(error)}{_where(error)}") from error


def _attribute(module: ModuleType, place: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [n for n in dir(found) if not n.startswith("_")]
            raise UsageError(f"{place} has no {name}{did_you_mean(part, public, likeness=0.5)}")
        found = getattr(found, part)
    return found


def _missing(factory: Callable[..., Any]) -> list[str]:
    """Return the names of the required arguments of `factory`; an empty list if its signature is not known."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _checked(word: str, name: str, made: Any) -> TorchModel:
    if not isinstance(made, tuple | list) or len(made) not in (2, 3):
        raise UsageError(f"{word} returned {_a(type(made).__name__)}; it should {RETURNS}")
    model, inputs, *rest = made
    if not isinstance(model, nn.Module | torch.export.ExportedProgram):
        raise UsageError(f"{word} returned {_a(type(model).__name__)} as the model, not an nn.Module; it should {RETURNS}")
    kwargs: Any = rest[0] if rest else {}
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, Mapping) and not rest:
        inputs, kwargs = (), inputs
    for given, kind, what in ((inputs, (tuple, list), "inputs"), (kwargs, Mapping, "keyword arguments")):
        if not isinstance(given, kind):
            raise UsageError(f"{word} returned {_a(type(given).__name__)} as {what}; it should {RETURNS}")
    return TorchModel(type(model).__name__ if isinstance(model, nn.Module) else name, model, tuple(inputs), dict(kwargs))


def torch_model(source: Source, command: str) -> TorchModel:
    """Return `source` if it is a PyTorch model. Otherwise raise UsageError, with the name of the `command` that needs one."""
    if isinstance(source, TorchModel):
        return source
    what = "an ONNX file" if isinstance(source, OnnxModel) else "a saved plan"
    raise UsageError(f"{command} runs a PyTorch model and {what} is none; name a callable or a .pt2 file")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, cut to 300 characters, or its type if the message is empty."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return said[:300] or type(error).__name__


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _a(word: str) -> str:
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"


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
"""Largest size, in bytes, of all entries of a saved model (a zip archive) when unpacked. A larger model is refused."""


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
    """Yield every (key, value) pair of every object in the parsed JSON `data`, at any depth."""
    waiting = [data]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            yield from found.items()
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found


def _archive(parts: dict[str, bytes]) -> io.BytesIO:
    """Return an archive of `parts` ({name: content}) in the format of torch.save."""
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer)
    for name, content in parts.items():
        if name not in ("version", "byteorder") and not name.startswith(".data/"):  # skip the records that torch's writer adds itself
            writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    buffer.seek(0)
    return buffer
