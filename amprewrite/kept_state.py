"""Run a model without a trace: buffers and random state are afterwards what they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Buffers of `model` and random state are afterwards what they were before."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and not buffer.is_inference() and not torch.equal(buffer, buffers[name]):
                    buffer.copy_(buffers[name])
