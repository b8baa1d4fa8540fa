"""Load the MODEL that an argument of the command line names: a factory, a `.pt2` file, an `.onnx` file, or a saved plan.

A factory is a Python callable without arguments that returns a model and inputs. It runs as code, as the user asks. `.onnx` and `.json`
files are data. A `.pt2` file may hold code that torch.export.load runs. Such a file is loaded only if it provably holds no code, or if
the user trusts it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from amprewrite.api.cli.pt2 import NotPlain, plain_copy
from amprewrite.report.cast_plan import CastPlan
from amprewrite.tables.boundary.arguments import did_you_mean
from amprewrite.tables.boundary.files import read_text
from amprewrite.tables.errors import AmpRewriteError
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
    """Return the model or plan that `word` names. With `trust`, a .pt2 file may run code. Raises UsageError if nothing can be loaded."""
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


# -- factories ----------------------------------------------------------------------------
def _called(word: str, place: str, name: str, returns: str) -> Any:
    factory = _attribute(_module(word, place), place, name)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise UsageError(f"{word} is {_a(type(factory).__name__)}, no function to call; it should {returns}")
    missing = _missing(factory)
    if missing:
        raise UsageError(f"{word} needs arguments ({', '.join(missing)}); name a callable that takes none")
    try:
        return factory()
    except (Exception, SystemExit) as error:  # SystemExit is no Exception, and would end this command with the status of the model's code
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
    if not isinstance(inputs, tuple | list) or not isinstance(kwargs, Mapping):
        raise UsageError(f"{word} returned {_a(type(inputs).__name__)} as inputs; it should {RETURNS}")
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
