"""While Dynamo captures a model, make functions such as `torch.is_autocast_enabled` report that autocast is on, with the dtype fp32.

Models switch autocast off where a low format would harm. Many do so only if autocast is on: otherwise `maybe_autocast(enabled=False)` of
transformers does nothing. If autocast is reported on, these models enter their regions without autocast, and the captured graph shows
the regions. The reported dtype is fp32, so that a cast to this dtype in the model's code changes no value.

1. Only the answers during capture change. autocast itself stays off: otherwise it would widen half values, refuse ops such as
   `binary_cross_entropy`, cost time in each call, and be seen by hooks, checkpoints and other code around the graphs. That code computes
   in fp32 in any case.
2. The true answer is given inside an autocast region that the model itself entered, and for a device that the model is not on.
3. The true answer is given to PyTorch's own code, which asks in order to choose kernels or, in `custom_fwd`, to convert inputs.
4. The true answer is given to a model that holds half values or is called with some. Such a model asks whether autocast will make dtypes
   agree. Autocast will not, because it is off.

Exporters run the model's code without Dynamo's answers, so autocast is really switched on around them, for fp32 (`autocast_for_fp32`).

Dynamo evaluates these functions as constants. While Dynamo converts a frame, they have handlers of ours instead (`handlers.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._dynamo.variables import ConstantVariable

from amprewrite.runtime.compiler.handlers import handling
from amprewrite.tables.boundary.members import buffers_in, parameters_in
from amprewrite.tables.formats import LOW_FORMATS
from amprewrite.torch_internals.dispatch import is_any_autocast_enabled

_HALF = frozenset(each.dtype for each in LOW_FORMATS)


def regions_around() -> int:
    """Return the number of nested torch.autocast regions that this thread is in, enabled or not."""
    around: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return around


@contextlib.contextmanager
def reporting_autocast_on(root: nn.Module, inputs: Any, around: int) -> Iterator[None]:
    """Context manager for a conversion of a frame by Dynamo, in which `torch.is_autocast_enabled` and similar functions return True.

    Items 2 to 4 at the top of this file name the exceptions. `root` is the model. `inputs` are the values that the frame reads, nested in
    lists, tuples and dicts. `around` is the number of autocast regions around the call of the model.
    """
    devices = _devices(root, inputs)
    if not devices:
        yield
        return

    def heard(device: str) -> bool:
        return device in devices and regions_around() == around

    def answer(asked: Callable[..., Any], told: bool | torch.dtype, default: str) -> Callable[..., Any]:
        def handle(_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            given = [each.as_python_constant() for each in (*args, *kwargs.values())]
            own = str(tx.f_globals.get("__name__", "")).partition(".")[0] == "torch"
            device = str(given[0]) if given else default
            return ConstantVariable.create(asked(*given) if own or not heard(device) else told)

        return handle

    answers: dict[Any, Callable[..., Any]] = {
        torch.is_autocast_enabled: answer(torch.is_autocast_enabled, True, "cuda"),
        torch.is_autocast_cpu_enabled: answer(torch.is_autocast_cpu_enabled, True, "cpu"),
        torch.get_autocast_dtype: answer(torch.get_autocast_dtype, torch.float32, "cuda"),
        torch.get_autocast_gpu_dtype: answer(torch.get_autocast_gpu_dtype, torch.float32, "cuda"),
        is_any_autocast_enabled: answer(is_any_autocast_enabled, True, min(devices)),
    }
    with handling(answers):
        yield


@contextlib.contextmanager
def autocast_for_fp32(root: nn.Module, inputs: Any) -> Iterator[None]:
    """Context manager that switches autocast on with the dtype fp32, on the devices of the model `root` and its `inputs`.

    If a parameter, buffer or input is half, nothing is switched on. So no value changes its dtype.
    """
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
    """Return the device types of the tensors of a model and its inputs; {"cpu"} without tensors.

    The result is an empty set if a tensor is in half precision.
    """
    tensors = [*chain(parameters_in(root), buffers_in(root)), *_tensors(inputs)]
    return set() if any(each.dtype in _HALF for each in tensors) else {each.device.type for each in tensors} or {"cpu"}


def _tensors(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts, at most `depth` levels deep.

    Objects of other classes are not searched: they may be under construction.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each, depth - 1)
