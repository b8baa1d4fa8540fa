"""Give the nodes canonical names and a canonical order: depth first from the outputs, independent of the order of the fx nodes.

This file also reads, from the model's source, facts about calls that capture loses:

1. Capture turns both `x.to(torch.float32)` and `x.to(y.dtype)` into `to(float32)`.
2. With `torch.amp.custom_fwd(cast_inputs=dtype)` the author of an autograd Function sets the dtype of its forward under mixed precision.
   Capture keeps only the stack frame in which PyTorch calls the forward.
3. If gradients are disabled already, capture does not record that the code enters `no_grad`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Sequence, Set
from functools import cache, lru_cache
from pathlib import PurePath
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import Fact, source_name
from amprewrite.tables.boundary.members import named_buffers_in, named_parameters_in
from amprewrite.torch_internals.operators import HigherOrderOperator

_PATH = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]|\.(\w+)|\[['\"]?([^'\"\]]+)['\"]?\]")

_CALL = re.compile(r"\._compiled_call_impl(?:\.__\w+__(?:\[\d+\])?|\.cell_contents)+")
"""Matches Dynamo's path from a module back to itself, through closure cells of the `_compiled_call_impl` that this package sets on it.

Dynamo takes this path where a class overrides `__call__`, as layers of transformers do: their `super().__call__` is traced as code.
"""


def module_path(node: torch.fx.Node, entry: str) -> str:
    """Return the path in the rewritten model of the module that called the op `node`. `entry` is the path of the captured module."""
    stack = node.meta.get("nn_module_stack")
    inner = ""
    if stack:
        inner = clean_path(next(reversed(stack.values()))[0])
    return ".".join(part for part in (entry, inner) if part)


def frame_path(graph: torch.fx.Graph, inputs: Sequence[Any], root: torch.nn.Module) -> str | None:
    """Return the path in `root` of the module whose frame was captured; None if no parameter or buffer of the graph shows the path.

    After a graph break the captured frame may belong to a sub-module. `inputs` are the real inputs of the graph.
    """
    paths: dict[int, list[str]] = {}
    for path, tensor in (*named_parameters_in(root, remove_duplicate=False), *named_buffers_in(root, remove_duplicate=False)):
        paths.setdefault(id(tensor), []).append(path)
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=False):
        local = clean_path(source_name(node))
        for path in paths.get(id(value), ()):
            if local and (path == local or path.endswith(f".{local}")):
                return path[: -len(local)].rstrip(".")
    return None


@functools.lru_cache(maxsize=4096)  # cached, because all ops of one module have the same path
def clean_path(text: str) -> str:
    """Return a module path without Dynamo's roots: "L['self']._modules['net']._modules['0']" and "L['self'].net.0" become "net.0"."""
    text = re.sub(r"^(?:L|G)\['[^']*'\]", "", _CALL.sub("", text))
    if not text.startswith((".", "[")):
        return text
    return ".".join(next(filter(None, match)) for match in _PATH.findall(text) if next(filter(None, match)) not in _PRIVATE)


_PRIVATE = {"_modules", "_parameters", "_buffers", "__self__"}


def _base_name(fact: Fact, entry: str, names: tuple[str, ...]) -> str:
    node = fact.node
    if not fact.dtype and fact.role in ("op", "input") and not isinstance(node.target, HigherOrderOperator):
        return f"size_{fact.op}" if fact.role == "op" else "size"  # separate names of sizes do not shift the numbers in names of ops
    if fact.role == "op":
        return fact.op
    if fact.role == "output":
        return "output"
    if node.op == "get_attr":
        return str(node.target)
    source = source_name(node)
    path = clean_path(source)
    if fact.role in ("parameter", "buffer") and path:
        return ".".join(part for part in (entry, path) if part)
    positional = re.fullmatch(r"L\['args'\]\[(\d+)\]", source)
    if positional and int(positional[1]) < len(names):
        return names[int(positional[1])]
    words = re.findall(r"'([^']+)'", source)
    return words[-1] if words else str(node.target)


def _depth_first(facts: dict[torch.fx.Node, Fact]) -> list[torch.fx.Node]:
    """Return the nodes in post-order from the outputs, then the writes and other effects that no output reads, in graph order."""
    done: dict[torch.fx.Node, None] = {}
    outputs = [node for node in facts if node.op == "output"]
    effects = [node for node in facts if node.op != "output"]
    for root in (*(a for o in outputs for a in o.all_input_nodes), *effects, *outputs):
        stack = [(root, iter(root.all_input_nodes))]
        while stack:
            node, feeders = stack[-1]
            if node in done:
                stack.pop()
                continue
            feeder = next((f for f in feeders if f not in done), None)
            if feeder is None:
                done[node] = None
                stack.pop()
            else:
                stack.append((feeder, iter(feeder.all_input_nodes)))
    return list(done)


def name_all(facts: dict[torch.fx.Node, Fact], entry: str, names: tuple[str, ...]) -> None:
    """Give each node its rank (its position in the canonical order) and a unique name: the op and a count, as in linear, linear_1, …

    Both are stored in the node's `Fact`. The rank does not depend on the order of the nodes in the graph. Inputs and weights keep their own
    names, which no op gets. `entry` is the path of the captured module, and `names` are the names of its positional parameters.
    """
    counts: Counter[str] = Counter()
    bases = {node: _base_name(fact, entry, names) for node, fact in facts.items()}
    given, taken = {base for node, base in bases.items() if facts[node].role != "op"}, set[str]()
    for rank, node in enumerate(_depth_first(facts)):
        fact, base = facts[node], bases[node]
        name = f"{base}_{counts[base]}" if counts[base] else base
        while name in taken or (name in given and name != base):
            counts[base] += 1
            name = f"{base}_{counts[base]}"
        fact.rank, fact.name = rank, name
        taken.add(name)
        counts[base] += 1


_ABOVE = PurePath(__file__).parents[__name__.count(".")]
"""The folder that contains this package."""
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.M)
_GRAD_MODES = {"no_grad", "enable_grad", "set_grad_enabled", "inference_mode", "once_differentiable"}
_LITERALS = {"float32", "float", "fp32", "FloatTensor"}


def frame_around(function: types.FunctionType) -> types.FunctionType:
    """Return a function that only calls `function`. Methods of PyTorch's own modules need this: Dynamo skips frames of PyTorch's files."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    assert isinstance(forward, types.FunctionType)
    return forward


def frame_around_object(called: Callable[..., Any]) -> types.FunctionType:
    """Return a function that only calls `called`, an object without Python code of its own such as a `functools.partial`."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    assert isinstance(forward, types.FunctionType)
    return forward


AROUND = tuple(around(frame_around).__code__ for around in (frame_around, frame_around_object))  # type: ignore[arg-type, operator]
"""The code objects of the functions that `frame_around` and `frame_around_object` return."""


def location(stack_trace: str | None) -> tuple[str, int]:
    """Return (file, line) of the innermost frame of a stack trace; ("", 0) if there is none. Wrappers by `frame_around` are skipped."""
    frames = [frame for frame in _FRAME.finditer(stack_trace or "") if frame["file"] != AROUND[0].co_filename]
    return (frames[-1]["file"], int(frames[-1]["line"])) if frames else ("", 0)


def source_of(stack_trace: str | None) -> str:
    """Return "file:line" of the innermost frame, as plans show it; "" if there is none. `file_label` shortens the name of the file."""
    file, line = location(stack_trace)
    return f"{file_label(file)}:{line}" if file else ""


@cache
def file_label(file: str) -> str:
    """Return a file's name as plans show it: without folders, but a file of this package keeps its path, such as "amprewrite/ir/x.py"."""
    path = PurePath(file)
    package = _ABOVE / __name__.partition(".")[0]
    return path.relative_to(_ABOVE).as_posix() if path.is_relative_to(package) else path.name


def has_own_dtype(stack_trace: str | None) -> bool:
    """True if an op belongs to the forward of an autograd Function whose dtype `torch.amp.custom_fwd(cast_inputs=...)` sets."""
    if stack_trace is None or "decorate_fwd" not in stack_trace:
        return False
    return _call_with_own_dtype() in ((frame["file"], int(frame["line"])) for frame in _FRAME.finditer(stack_trace))


@cache
def _call_with_own_dtype() -> tuple[str, int]:
    """Return (file, line) of the last call in the wrapper of `custom_fwd`. It runs a forward with `cast_inputs` outside of autocast."""
    code = torch.amp.custom_fwd(print, device_type="cpu").__code__  # `print` can be any function: the wrapper's code is the same
    lines, first = inspect.getsourcelines(code)
    calls = [first + place for place, line in enumerate(lines) if "return fwd(" in line]
    return code.co_filename, calls[-1]


def runs_without_grad(stack_trace: str | None, around: str | None) -> bool:
    """True if, by the model's source, an op runs under `no_grad` or a similar mode that was entered after the outer call `around`.

    `stack_trace` is the trace of the op. It begins with the frames of the trace `around`. Only the later frames are checked. False if the
    source cannot be read.
    """
    outside = len(_FRAME.findall(around or ""))
    frames = [(frame["file"], int(frame["line"])) for frame in _FRAME.finditer(stack_trace or "")][outside:]
    return any(_without_grad_at(file, line) for file, line in frames)


@lru_cache(maxsize=4096)
def _without_grad_at(file: str, line: int) -> bool:
    if (file, line) in _calls_once_differentiable():
        return True
    said: bool | None = None
    for node in ast.walk(_file(file)):  # `ast.walk` visits outer nodes first, so the innermost grad mode decides
        if isinstance(node, ast.FunctionDef | ast.With) and node.lineno <= line <= (node.end_lineno or 0):
            given = node.decorator_list if isinstance(node, ast.FunctionDef) else [item.context_expr for item in node.items]
            said = next((not _enables(each) for each in given if _names_of(each) & _GRAD_MODES), said)
    return bool(said)


@cache
def _calls_once_differentiable() -> frozenset[tuple[str, int]]:
    """Return (file, line) for all lines of the wrapper of `once_differentiable`. Ops below such a line in a trace run under `no_grad`."""
    code = torch.autograd.function.once_differentiable(print).__code__
    lines, first = inspect.getsourcelines(code)
    return frozenset((code.co_filename, first + place) for place in range(len(lines)))


@lru_cache(maxsize=64)
def _file(file: str) -> ast.Module:
    """Return the syntax tree of a file; an empty module if the source cannot be parsed."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


def _names_of(expression: ast.expr) -> set[str]:
    return {_name(each) for each in ast.walk(expression) if isinstance(each, ast.expr)}


def _enables(mode: ast.expr) -> bool:
    """True if a grad mode in the source enables gradients: `enable_grad`, or `set_grad_enabled` with a literal True."""
    on = any(isinstance(each, ast.Constant) and each.value is True for each in ast.walk(mode))
    return "enable_grad" in _names_of(mode) or ("set_grad_enabled" in _names_of(mode) and on)


def dtype_is_literal(stack_trace: str | None, call: str) -> bool:
    """True if the source line of the innermost frame calls a function named `call` with fp32 spelled out, as in `torch.float32`.

    Unreadable source counts as spelled out, so that a dtype the model may have asked for is kept.
    """
    file, line = location(stack_trace)
    return not file or _literal_at(file, line, _marked(stack_trace or ""), call)


def _marked(stack_trace: str) -> str:
    """Return the part of the source line that the carets of the innermost frame mark; "" if there are no carets."""
    lines = stack_trace.rstrip().splitlines()
    if len(lines) < 2 or not lines[-1].strip() or set(lines[-1].strip()) - set("^~"):
        return ""
    marks, code = lines[-1], lines[-2]
    begin = len(marks) - len(marks.lstrip())
    return code[begin : len(marks.rstrip())]


@lru_cache(maxsize=4096)
def _literal_at(file: str, line: int, marked: str, call: str) -> bool:
    tree = _parsed(marked) or _statement(file, line)
    if tree is None:
        return True
    calls = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and _name(c.func) == call]
    return not calls or any(_has_literal(c, _constants(file)) for c in calls)


def _statement(file: str, line: int) -> ast.AST | None:
    """Parse the file from `line` on: one line, then two, up to 15. Return the first syntax tree; None if every attempt fails."""
    for length in range(1, 16):
        tree = _parsed("".join(linecache.getline(file, line + i) for i in range(length)))
        if tree is not None:
            return tree
    return None


def _parsed(text: str) -> ast.AST | None:
    if not text.strip():
        return None
    text = textwrap.dedent(text).strip()
    for form in (text, text.removeprefix("return "), f"{text} pass" if text.endswith(":") else f"({text})"):
        try:
            return ast.parse(form)
        except SyntaxError:
            continue
    return None


def _name(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def _has_literal(call: ast.Call, constants: Set[str]) -> bool:
    """True if an argument of `call` spells out fp32, such as `torch.float32`, or is one of the names `constants`, which stand for fp32."""
    own = [*call.args, *(k.value for k in call.keywords)]
    named = any(isinstance(arg, ast.Name) and arg.id in constants for arg in own)
    return named or any(_name(arg) in _LITERALS or (isinstance(arg, ast.Constant) and arg.value in _LITERALS) for arg in own)


@lru_cache(maxsize=64)
def _constants(file: str) -> frozenset[str]:
    """Return the names that a module defines as fp32, as in `DTYPE = torch.float32`."""
    made = (each for each in _file(file).body if isinstance(each, ast.Assign) and _name(each.value) in _LITERALS)
    return frozenset(target.id for each in made for target in each.targets if isinstance(target, ast.Name))
