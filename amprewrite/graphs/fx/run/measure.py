"""Measure prices (run times) on the current device: each op of a graph and each size of cast is timed once, and cached on disk.

1. An op is called as in the graph, on random tensors of its shapes. It has two prices: in fp32 and in the low format.
2. After warm-up calls, several short runs are timed. The price is the smallest mean time of a call, because other work on the machine can
   only add time.
3. Prices are stored in the user's cache folder, by device, PyTorch version, threads, op, shapes and dtypes.

An op that cannot be called alone (it refuses the format, or an argument is no strided tensor) has the price of the device table instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg
from torch.utils.benchmark import Timer

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import example_value, hint
from amprewrite.graphs.fx.run.price_cache import Prices, cache_file, read_prices, write_prices
from amprewrite.ir.cost import Measured, moves_nothing
from amprewrite.tables.boundary.consoles import bar
from amprewrite.tables.formats import FP32, Format
from amprewrite.torch_internals.trees import tree_leaves

SECONDS = 6e-3
"""Least duration, in seconds, of all timed runs of one call together. Each run repeats the call, and the fastest counts."""


def measure(captured: Captured) -> Measured:
    """Return the times of the ops and casts of a graph, read from disk or measured now. New times are written to disk."""
    known, new = read_prices(), Prices()
    problem = captured.problem
    found, place = Measured(), _place(problem.device)
    tasks = list(_tasks(captured))
    with bar(f"timing {problem.name}", len(tasks)) as advance:
        for where, key, make in tasks:
            whole = f"{place}|{key}"
            if whole not in known:
                known[whole] = new[whole] = _seconds(make)
            seconds = known[whole]
            found.refused += seconds is None
            if seconds is not None and isinstance(where, tuple):
                found.ops[where] = seconds
            elif seconds is not None and isinstance(where, int):
                found.casts[where] = seconds
            advance()
    if new:
        write_prices(new)
    return found


Task = tuple[tuple[str, str] | int, str, Callable[[], Callable[[], Any]]]
"""One timing: (key of the result in `Measured.ops` or `Measured.casts`, key on disk, function that prepares the call and returns it)."""


def _tasks(captured: Captured) -> Iterator[Task]:
    problem = captured.problem
    low, sizes = problem.policy.low, set()
    for node in problem.graph:
        if node.carries_fp32:
            sizes.add(node.numel)
        fx_node = captured.nodes.get(node.name)
        if fx_node is None or not node.carries_fp32 or node.kind is None or moves_nothing(node):
            continue
        for fmt in (FP32, low):
            key = _key(fx_node, fmt)
            if key:
                yield (node.name, fmt.name), key, _caller(fx_node, fmt, problem.device)
    for numel in sorted(sizes):
        yield numel, f"cast {numel} {low.name}", _caster(numel, low, problem.device)


def _key(node: torch.fx.Node, fmt: Format) -> str:
    """Return the key of a call in the price file, which is the call as text; "" if the call cannot be made.

    A call cannot be made if a node among its arguments is no strided tensor.
    """
    target: Any = node.target
    name = target if isinstance(target, str) else f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', '')}"
    leaves = []
    for leaf in tree_leaves((node.args, node.kwargs)):
        value = example_value(leaf) if isinstance(leaf, torch.fx.Node) else leaf
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            dtype = fmt.name if value.dtype == torch.float32 else str(value.dtype)
            leaves.append(f"{dtype}{[hint(size) for size in value.shape]}")
        elif isinstance(leaf, torch.fx.Node):
            return ""
        else:
            leaves.append(repr(leaf))
    return f"{name}({', '.join(leaves)}) {fmt.name}"


def _caller(node: torch.fx.Node, fmt: Format, device: str) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        def tensor(argument: torch.fx.Node) -> torch.Tensor:
            value = example_value(argument)
            shape = [hint(size) for size in value.shape]
            if value.dtype == torch.float32:
                return torch.rand(shape, dtype=torch.float32, device=device).to(fmt.dtype)
            return torch.zeros(shape, dtype=value.dtype, device=device)

        args, kwargs = map_arg((node.args, node.kwargs), tensor)
        if node.op == "call_method":
            method = getattr(args[0], str(node.target))
            return lambda: method(*args[1:], **kwargs)
        target: Any = node.target
        return lambda: target(*args, **kwargs)

    return make


def _caster(numel: int, low: Format, device: str) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        tensor = torch.rand(numel, dtype=torch.float32, device=device)
        return lambda: tensor.to(low.dtype)

    return make


def _seconds(make: Callable[[], Callable[[], Any]]) -> float | None:
    """Return the seconds that one call takes; None if the call raises an error."""
    try:
        with torch.no_grad(), torch.random.fork_rng():
            timer = Timer("call()", globals={"call": make()}, num_threads=torch.get_num_threads())
            return min(timer.blocked_autorange(min_run_time=SECONDS).times)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None


def _place(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else f"{device} x{torch.get_num_threads()}"
    return f"{name}|torch {torch.__version__}"


__all__ = ["Measured", "cache_file", "measure"]
