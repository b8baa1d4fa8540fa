"""Give the nodes canonical names and a canonical order: depth first from the outputs, independent of the order of the fx nodes."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import Fact, source_name
from amprewrite.tables.boundary.members import named_buffers_in, named_parameters_in
from amprewrite.torch_internals.operators import HigherOrderOperator

_PATH = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]|\.(\w+)|\[['\"]?([^'\"\]]+)['\"]?\]")

_CALL = re.compile(r"\._compiled_call_impl\.__closure__\[\d+\]\.cell_contents")
"""Dynamo's path from a module back to itself, through the cell of `part_call` that holds the module.

Dynamo takes this path where a class overrides `__call__`, as layers of transformers do: their `super().__call__` is traced as code.
"""


def module_path(node: torch.fx.Node, entry: str) -> str:
    """Return the path, from the root of the rewritten model, of the module that called `node`. `entry` is the captured module's path."""
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


@functools.lru_cache(maxsize=4096)  # ops of one module share a path
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
        return f"size_{fact.op}" if fact.role == "op" else "size"  # a name of their own, so that sizes do not shift the numbers of ops
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
    """Set the rank and the name of every fact. Names are unique: the op and a count, as in linear, linear_1, …

    The rank does not depend on the order of the nodes in the graph. Inputs and weights keep their own names, and no op gets such a name.
    `entry` is the path of the captured module, and `names` are the names of its positional parameters.
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
