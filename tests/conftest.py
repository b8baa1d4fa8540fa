"""What all tests share: golden texts, and capture of small functions as fx graphs."""

from __future__ import annotations

import functools
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.guards
import torch.fx

sys.path[:0] = [str(Path(__file__).parent / "support")]
"""Helpers of all tests are imported by their bare names."""
GOLDEN = Path(__file__).parent / "golden"


def pytest_configure() -> None:
    """Switch off measurements and logs of torch which change no result, and took a third of the time of a small capture."""
    # Dynamo measures each set of guards once, and empties the processor's caches first: 20 ms a graph.
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    # pytest listens to every logger that does not propagate, and torch writes each step of a capture to this one if somebody listens.
    logging.getLogger("torch.__trace").addHandler = lambda _: None  # type: ignore[method-assign]


def pytest_collection_finish() -> None:
    """Set all objects that imports and collection made aside, where no search of the garbage collector looks at them again.

    A first step in fp16 searches all other objects for optimizers and GradScalers, which took 90 ms each time.
    """
    if "onnxscript" in sys.modules:
        _read_signatures_once()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def objects_of_a_test_set_aside() -> Iterator[None]:
    """After each test set aside what it left, too: graphs that Dynamo keeps, modules that torch imported late, and its caches."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def autocasts_cache_on() -> None:
    """A file begins with autocast's cache on.

    torch's older ONNX exporter leaves it off when it fails, and then autocast casts a weight once a read: it adds up gradients in fp32, and
    bars that follow its error are ten times as tight.
    """
    torch.set_autocast_cache_enabled(True)


def _read_signatures_once() -> None:
    """Keep what onnxscript reads out of the source of its functions, which torch.onnx.export reads anew each time, for 0.3 s."""
    from onnxscript.values import TracedOnnxFunction

    read = getattr(TracedOnnxFunction, "function_ir", None)
    if isinstance(read, property) and read.fget:
        TracedOnnxFunction.function_ir = property(functools.cache(read.fget))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what is printed now into tests/golden")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("name.txt", text)` compares with tests/golden/name.txt; `pytest --update-golden` writes the file instead."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n")
        assert path.is_file(), f"there is no {path}; run pytest --update-golden and read what it wrote"
        assert text + "\n" == path.read_text()

    return check


@pytest.fixture
def capture() -> Callable[..., torch.fx.GraphModule]:
    """`capture(function, *args)`: the one graph that torch.compile makes of it, without gradients unless `grad=True`."""

    def graph_of(function: Callable[..., Any], *args: Any, grad: bool = False) -> torch.fx.GraphModule:
        found: list[torch.fx.GraphModule] = []

        def keep(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            found.append(module)
            return module.forward

        torch._dynamo.reset()
        with torch.set_grad_enabled(grad):
            torch.compile(function, backend=keep, fullgraph=True)(*args)
        (module,) = found
        return module

    return graph_of
