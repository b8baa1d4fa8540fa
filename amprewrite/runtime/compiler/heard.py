"""Answers to a model's questions about torch.autocast while Dynamo captures it: autocast is on, for fp32.

Models switch autocast off where a low format would harm, and many do so only if it is on: `maybe_autocast(enabled=False)` of transformers
does nothing otherwise. Told that it is on, they enter such regions, and these stand in the graph. The dtype that they are told is fp32, so
that no cast which they make by hand changes a value.

1. Only capture is told so. autocast itself stays off: it would widen half values, refuse ops such as `binary_cross_entropy`, cost time at
   each call, and be seen by hooks, checkpoints and other code around the graphs. That code computes in fp32 in any case.
2. Inside a region of the model's own the answer is true, and so it is for a device that the model is not on.
3. PyTorch's own code is told the truth: it asks in order to choose kernels, and `custom_fwd` to convert its inputs.
4. So is a model that holds half values or is called with some. Such code asks whether autocast would make dtypes agree, and it does not.

Exporters run the model's code, so autocast is switched on around them, for fp32 (`autocast_for_fp32`).

Dynamo answers these questions itself, as constants: they are taken from its table of such functions while it converts a frame, under the
lock that it converts frames under, and put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables import torch as torch_functions

from amprewrite.tables.boundary.members import buffers_in, parameters_in
from amprewrite.tables.formats import LOW_FORMATS
from amprewrite.torch_internals.dispatch import is_any_autocast_enabled

_FOLDED: dict[Any, Any] = torch_functions.constant_fold_functions  # type: ignore[assignment]
_HALF = frozenset(each.dtype for each in LOW_FORMATS)


def regions_around() -> int:
    """How many regions of torch.autocast this thread is in, enabled or not."""
    around: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return around


@contextlib.contextmanager
def reporting_autocast_on(root: nn.Module, inputs: Any, around: int) -> Iterator[None]:
    """While Dynamo converts a frame: questions about autocast are answered as above.

    `root` is the model, `inputs` are what the frame reads, in lists, tuples and dicts, `around` tells how many regions of autocast there
    were around the call.
    """
    devices = _devices(root, inputs)
    if not devices:
        yield
        return

    def heard(device: str) -> bool:
        return device in devices and regions_around() == around

    def answer(asked: Callable[..., Any], told: Callable[[str], Any], default: str) -> Callable[..., Any]:
        def handle(_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            given = [each.as_python_constant() for each in (*args, *kwargs.values())]
            own = str(tx.f_globals.get("__name__", "")).partition(".")[0] == "torch"
            device = str(given[0]) if given else default
            return ConstantVariable.create(asked(*given) if own or not heard(device) else told(device))

        return handle

    def on(_: str) -> bool:
        return True

    def fp32(_: str) -> torch.dtype:
        return torch.float32

    answers: dict[Any, Callable[..., Any]] = {
        torch.is_autocast_enabled: answer(torch.is_autocast_enabled, on, "cuda"),
        torch.is_autocast_cpu_enabled: answer(torch.is_autocast_cpu_enabled, on, "cpu"),
        torch.get_autocast_dtype: answer(torch.get_autocast_dtype, fp32, "cuda"),
        torch.get_autocast_gpu_dtype: answer(torch.get_autocast_gpu_dtype, fp32, "cuda"),
        is_any_autocast_enabled: answer(is_any_autocast_enabled, on, min(devices)),
    }
    handlers = torch_functions.TorchInGraphFunctionVariable._get_handlers()
    with compile_lock:
        before = dict(_FOLDED)
        for function in answers:
            _FOLDED.pop(function, None)
        handlers.update(answers)
        try:
            yield
        finally:
            for function in answers:
                handlers.pop(function, None)
            _FOLDED.update(before)


@contextlib.contextmanager
def autocast_for_fp32(root: nn.Module, inputs: Any) -> Iterator[None]:
    """Switch autocast on for fp32, on the devices of a model that holds no half values: no value changes its dtype."""
    before = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in sorted(_devices(root, inputs))]
    try:
        for device, _, _ in before:
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, torch.float32)
        yield
    finally:
        for device, enabled, dtype in before:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


def _devices(root: nn.Module, inputs: Any) -> set[str]:
    """The types of the devices of a model and its inputs; empty if some of these are half values."""
    tensors = [*chain(parameters_in(root), buffers_in(root)), *_tensors(inputs)]
    return set() if any(each.dtype in _HALF for each in tensors) else {each.device.type for each in tensors} or {"cpu"}


def _tensors(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, at most `depth` levels deep.

    Objects of other classes are not searched: they may be under construction.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each, depth - 1)


__all__ = ["autocast_for_fp32", "regions_around", "reporting_autocast_on"]
