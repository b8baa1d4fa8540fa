"""Measure prices (run times) on the current device: each op of a graph and each size of cast is timed once, and cached on disk.

1. An op is called as in the graph, on random tensors of its shapes. It has two prices: in fp32 and in the low format.
2. After warm-up calls, several short runs are timed. The price is the smallest mean time of a call, because other work can only add time.
3. Prices are stored in the user's cache folder, by device, PyTorch version, threads, op, shapes and dtypes. The file is read as a whole or
   not at all. A write keeps other processes' prices, and is atomic.

An op that cannot be called alone (it refuses the format, or an argument is no strided tensor) has the price of the device table instead.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg
from torch.utils.benchmark import Timer

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import example_value, hint
from amprewrite.ir.cost import Measured, moves_nothing
from amprewrite.tables.boundary.files import alone_in, write_text
from amprewrite.tables.boundary.printable import bar
from amprewrite.tables.errors import AmpRewriteWarning, EmitError, one_line
from amprewrite.tables.formats import FP32, Format
from amprewrite.torch_internals.trees import tree_leaves

SECONDS = 6e-3
"""Least duration, in seconds, of all timed runs of one call together. Each run repeats the call, and the fastest run counts."""


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
    """Return the key of a call in the price file: the call with `fmt` in place of fp32, then `fmt`, as in "torch.add(bf16[8], 1) bf16".

    The key is "" if an argument node is no strided tensor: such a call cannot be made alone.
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
    """Return the seconds that a call of the function `make()` takes; None if making or calling this function raises an error."""
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


Prices = dict[str, float | None]
"""Seconds that a call takes, by the text of the call; None for a call that cannot be made alone."""
LONGEST = 3600.0
"""Largest price, in seconds, that is accepted as the time of one call. A larger number means that the file is damaged."""


def cache_file() -> Path | None:
    """Return the path of the price file: `amprewrite/timings.json` in the user's cache folder; None for a user without a home folder."""
    folder = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(folder or Path.home() / ".cache") / "amprewrite" / "timings.json"
    except RuntimeError:
        return None


def read_prices() -> Prices:
    """Return the prices on disk; {} if the file is missing, unreadable or damaged.

    A damaged file raises a warning, and the next write replaces the file.
    """
    path = cache_file()
    if path is None:
        return {}
    try:
        return _read(path)
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        said = one_line(error, 200)
        warnings.warn(f"{path} is damaged ({said}): its prices are measured anew, and it is replaced", AmpRewriteWarning, stacklevel=2)
        return {}


def write_prices(new: Prices) -> None:
    """Add the prices `new` to the file on disk. The file stays unchanged, without an error, if it cannot be written or the disk is full."""
    path = cache_file()
    if path is None:
        return
    with contextlib.suppress(OSError, EmitError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(path.parent):
            try:
                known = _read(path)
            except (OSError, ValueError, RecursionError):
                known = {}
            write_text(path, json.dumps({**known, **_checked(new)}, indent=0, sort_keys=True))


def _read(path: Path) -> Prices:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__} instead of prices by name")
    return _checked(found)


def _checked(prices: Prices) -> Prices:
    for name, price in prices.items():
        if price is not None and not _plausible(price):
            raise ValueError(f"{str(price)[:40]!r} is no number of seconds, at {name[:80]!r}")
    return prices


def _plausible(price: object) -> bool:
    return isinstance(price, int | float) and not isinstance(price, bool) and math.isfinite(price) and 0 < price <= LONGEST
