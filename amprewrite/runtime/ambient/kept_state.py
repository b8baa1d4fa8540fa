"""Context managers that restore random states, hooks, and the tensors that a run of a model may write, after the run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from amprewrite.tables.boundary.members import buffers_in, modules_in, parameters_in
from amprewrite.torch_internals.dispatch import FakeTensor
from amprewrite.torch_internals.trees import tree_leaves


class _Outermost:
    """Saves the CPU random state, which all threads share, when the first of several overlapping `random_state_kept` blocks begins.

    The state is restored when the last of these blocks ends. The blocks may run in different threads.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running = 0
        self.state: torch.Tensor | None = None

    def enter(self) -> None:
        with self.lock:
            if not self.running:
                self.state = torch.get_rng_state()
            self.running += 1

    def leave(self) -> None:
        with self.lock:
            self.running -= 1
            if not self.running and self.state is not None:
                torch.set_rng_state(self.state)
                self.state = None


_OUTERMOST = _Outermost()


@contextlib.contextmanager
def random_state_kept(devices: Sequence[int] = ()) -> Iterator[None]:
    """Context manager that restores the random states of the CPU and of the CUDA `devices`, given by index.

    If blocks of several threads overlap, the block that ends last restores the CPU state from before the first block. The state from
    before the last block would be wrong, because a block that was already running may have changed it.
    """
    _OUTERMOST.enter()
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        _OUTERMOST.leave()


@contextlib.contextmanager
def hooks_kept(values: Any) -> Iterator[None]:
    """Context manager that in the end removes the gradient hooks (`register_hook`) that were added inside it to tensors in `values`."""
    before = [(t, set(t._backward_hooks or ())) for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.requires_grad]
    try:
        yield
    finally:
        for tensor, kept in before:
            for key in set(tensor._backward_hooks or ()) - kept:
                del tensor._backward_hooks[key]  # type: ignore[union-attr]


@contextlib.contextmanager
def state_kept(model: nn.Module, inputs: Any = ()) -> Iterator[None]:
    """Context manager that restores buffers, `inputs`, gradient hooks, and random states of the CPU and the GPUs that hold parameters."""
    tables = [(module._buffers, dict(module._buffers)) for module in modules_in(model)]
    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and not (leaf.is_meta or isinstance(leaf, FakeTensor))]
    values = [(tensor, tensor.detach().clone(), _version(tensor)) for tensor in (*buffers_in(model), *given)]
    devices = sorted({p.device.index or 0 for p in parameters_in(model) if p.device.type == "cuda"})
    try:
        with random_state_kept(devices), hooks_kept(((*parameters_in(model),), inputs)):
            yield
    finally:
        for table, before in tables:
            if table.keys() != before.keys() or any(table[name] is not buffer for name, buffer in before.items()):
                table.clear()  # the model assigned new tensors to its buffers
                table.update(before)
        with torch.no_grad():
            for tensor, value, version in values:
                valued = tensor.layout is torch.strided and not tensor.is_nested
                same = _is_equal(tensor, value) if valued else _version(tensor) == version
                if not same and (torch.is_inference_mode_enabled() or not tensor.is_inference()):
                    tensor.copy_(value) if tensor.shape == value.shape else tensor.set_(value)  # type: ignore[call-overload]


def _version(tensor: torch.Tensor) -> int | None:
    """Return the version counter of a tensor, which each in-place write increments; None for an inference tensor, which has no counter."""
    return None if tensor.is_inference() else tensor._version


def _is_equal(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """True if both tensors hold the same values. NaN equals NaN, so `state_kept` does not write to unchanged tensors with NaN."""
    if value.is_floating_point() and value.element_size() == 1:  # `allclose` knows no fp8
        return torch.equal(tensor.view(torch.uint8), value.view(torch.uint8))
    may_be_nan = tensor.shape == value.shape and (value.is_floating_point() or value.is_complex())
    return torch.equal(tensor, value) or (may_be_nan and torch.allclose(tensor, value, 0, 0, equal_nan=True))
