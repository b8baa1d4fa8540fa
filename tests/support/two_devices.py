"""An accelerator of two devices, "pair:0" and "pair:1", that computes on the CPU: several devices are tested without hardware.

Its numbers are the CPU's, and operands on different devices are refused as on CUDA. A process that registers it has it for good, so
tests run it in a process of its own.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.parallel.comm
from torch import Tensor
from torch.utils import cpp_extension

NAME = "pair"


def register(folder: Path) -> None:
    """Compile the accelerator in `folder`, unless that was done before, and register it."""
    folder.mkdir(parents=True, exist_ok=True)
    made = cpp_extension.load("two_devices", [str(Path(__file__).with_suffix(".cpp"))], build_directory=str(folder), extra_cflags=["-O0"])
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(NAME)
    module.__dict__.update(
        is_available=lambda: True, is_initialized=lambda: True, _is_in_bad_fork=lambda: False, device_count=lambda: 2,
        current_device=made.current, set_device=lambda index: made.exchange(torch.device(NAME, index).index),
        _exchange_device=made.exchange, _maybe_exchange_device=made.exchange,
        device=functools.partial(_on, made.exchange), get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        synchronize=lambda *_: None, manual_seed_all=lambda seed: None,
        get_rng_state=lambda *_: torch.get_rng_state(), set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )  # fmt: skip
    torch._register_device_module(NAME, module)
    for function in (broadcast_coalesced, reduce_add_coalesced, scatter, gather):  # builds for a CPU have none of them
        setattr(torch.nn.parallel.comm, function.__name__, function)
    torch.utils.generate_methods_for_privateuse1_backend()


@contextmanager
def _on(exchange: Callable[[int], int], device: torch.device | str | int) -> Iterator[None]:
    old = exchange(device if isinstance(device, int) else torch.device(device).index)
    try:
        yield
    finally:
        exchange(old)


# -- what nn.DataParallel moves -----------------------------------------------------------------------
def broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int = 0) -> list[list[Tensor]]:
    """The very tensors for the first device, copies for the others."""
    return [list(tensors) if place == 0 else [t.to(f"{NAME}:{device}") for t in tensors] for place, device in enumerate(devices)]


def reduce_add_coalesced(inputs: Sequence[Sequence[Tensor]], destination: int, buffer_size: int = 0) -> list[Tensor]:
    """The sums of what lies on several devices."""
    return [sum(t.to(f"{NAME}:{destination}") for t in each) for each in zip(*inputs, strict=True)]  # type: ignore[misc]


def scatter(tensor: Tensor, devices: Sequence[int], chunk_sizes: None = None, dim: int = 0, streams: object = None) -> tuple[Tensor, ...]:
    """A chunk for each device."""
    return tuple(part.to(f"{NAME}:{device}") for part, device in zip(tensor.chunk(len(devices), dim), devices, strict=False))


def gather(tensors: Sequence[Tensor], dim: int, destination: int) -> Tensor:
    """All chunks on one device."""
    return torch.cat([t.to(f"{NAME}:{destination}") for t in tensors], dim)
