"""Whether gradients hold inf or NaN: flags that stay on the device, and what several ranks need to agree on them.

A flag is a 0-dim fp32 tensor, 0 or above 0. Two moments ask for one:

1. Before an optimizer steps: `find_nonfinite`, which agrees with the ranks that hold the other shards.
2. At the end of a backward: `found_after_backward`, before the loop can hide an infinity (`clip_grad_value_`, `nan_to_num_`).
   It makes no collective call, because ranks need not run the same backwards. A flag of a sharded gradient joins the agreement
   before the step. A flag of a dense gradient would stay on its rank, so where several ranks train, infinities become NaN
   instead: clamps keep NaN, and every reduction hands it on.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from amprewrite.graphs.fx.ops.cuda_graphs import recording
from amprewrite.graphs.fx.ops.finite_flags import finite_flags
from amprewrite.graphs.fx.ops.on_device import on_device
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import NARROW_DTYPES
from amprewrite.torch_internals.kernels import norms_of_tensors, unscale_and_check

Group = tuple[Any, torch.device | None]
"""A process group, None for the world, and the device that its collectives need, None for any."""


def find_nonfinite(params: Iterable[Tensor], noted: Sequence[Tensor] = (), beside: Iterable[Any] = ()) -> Tensor | None:
    """A flag, above 0 if any gradient holds inf or NaN on any rank that shares it, or a `noted` flag says so; None without gradients.

    Each shard is checked where it lies. Who takes part in the agreement follows from the parameters and not from the
    gradients, so every rank makes the same collective calls. Dense gradients that DDP averaged agree by themselves. The ranks of the
    process groups `beside` hold other parameters that step together with these, and agree, too.
    """
    groups: dict[int, Group] = {id(group): (group, None) for group in beside}
    gradients: list[Tensor] = []
    p = None
    for p in params:
        groups |= sharing(p)
        if p.grad is None:
            continue
        if p.grad.dtype in NARROW_DTYPES:
            raise PolicyError(
                f"the gradient of a parameter of shape {tuple(p.shape)} is fp16, in which small updates are lost; "
                "keep the parameters in fp32 (model.float()): they are the master weights"
            )
        gradients.append(p.grad)
    if p is None or not (gradients or groups):
        return None
    with torch.inference_mode(False), torch.no_grad():
        found = any_of(_flags(gradients, start=_fresh(noted)) or [_flag(0.0, p.device)])
        for group, on in groups.values():
            shared = found if on is None else found.to(on)
            torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX, group=group)
            found = shared.to(found.device)
    return found


def found_after_backward(params: Iterable[Tensor]) -> Tensor | None:
    """A flag, above 0 if gradients of `params` on this rank are not finite; None if no flag has to be kept."""
    apart = several_ranks()
    dense: list[Tensor] = []
    kept: list[Tensor] = []
    for p in params:
        gradient = p.grad
        if gradient is not None:
            (dense if apart and not sharing(p) else kept).append(gradient)
    with torch.inference_mode(False), torch.no_grad():
        if dense:
            infinities_to_nan(dense)
        return any_of(_flags(kept, checked=True)) if kept else None


def infinities_to_nan(gradients: Iterable[Tensor]) -> None:
    """Turn infinities into NaN in place; finite values keep theirs. A gradient that is part of an autograd graph is left alone."""
    buckets: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if not gradient.requires_grad and gradient.numel():
            values = gradient._values() if gradient.is_sparse else gradient  # `coalesce` would make a copy
            values = local_values(values)
            buckets[values.device, values.dtype].append(values)
    for values_of_a_kind in buckets.values():
        torch._foreach_lerp_(values_of_a_kind, values_of_a_kind, 0.0)  # x + 0 * (x - x)


def any_of(flags: Sequence[Tensor]) -> Tensor:
    """One flag for several, on the device of the first: 0 or 1 and no sum, because Adam takes it off its step count."""
    where = flags[0].device
    return flags[0] if len(flags) == 1 else torch.stack([on_device(flag, where) for flag in flags]).amax()


def any_nonzero(gradients: Iterable[Tensor]) -> Tensor:
    """1 if one of the gradients holds anything but zeros on this rank, 0 otherwise: a 0-dim fp32 tensor on the first one's device."""
    with torch.inference_mode(False), torch.no_grad():
        by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
        where = None
        for gradient in gradients:
            values = local_values(gradient.detach())
            where = where or values.device
            if values.numel():
                by_device[values.device].append(values)
        flags = [torch.stack([n.float() for n in norms_of_tensors(g, math.inf)]).ne(0).any().float() for g in by_device.values()]
        return any_of(flags) if flags else _flag(0.0, where or torch.device("cpu"))


def _fresh(noted: Sequence[Tensor]) -> Tensor | None:
    """One flag of our own for all noted flags."""
    return (any_of(noted) if len(noted) > 1 else noted[0].clone()) if noted else None


def _flags(gradients: Iterable[Tensor], checked: bool = False, start: Tensor | None = None) -> list[Tensor]:
    """Flags that together tell of all the gradients, and of what `start` tells, which may be raised in place.

    `checked`: what was checked while it was made is not read again.
    """
    buckets: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    flags: list[Tensor] = []
    for gradient in gradients:
        if gradient.requires_grad:  # of `create_graph=True`: the kernel below writes
            flags.append((~local_values(gradient.detach()).isfinite().all()).float())
            continue
        if type(gradient) is not Tensor or gradient.is_sparse or gradient.dtype != torch.float32:
            gradient = local_values(gradient)
        buckets[gradient.device, gradient.dtype].append(gradient)
    found: dict[torch.device, Tensor] = {} if start is None else {start.device: start}
    for (where, _), members in buckets.items():
        known, left = finite_flags(members) if checked else ([], members)
        here = [flag for flag in known if flag.device == where]
        if here:
            found.setdefault(where, here[0])  # this flag covers only gradients checked here, so the kernel below may set it in place
        flags += [flag for flag in known if flag is not found.get(where)]
        if left:
            if where not in found:
                found[where] = _flag(0.0, where)
            unscale_and_check(left, found[where], _one(where))
    return [*found.values(), *flags]


def _flag(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def _one(device: torch.device) -> Tensor:
    """1.0 on `device`, which nothing writes; a CUDA graph that is being recorded gets its own."""
    return _flag(1.0, device) if recording(device) else _kept_one(device)


@functools.cache
def _kept_one(device: torch.device) -> Tensor:
    return _flag(1.0, device)


def several_ranks() -> bool:
    """Whether torch.distributed runs with more than one rank."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def sharing(p: Tensor) -> dict[int, Group]:
    """The process groups over which `p` is sharded: a DTensor's (FSDP2, tensor parallel), or the world for FSDP1."""
    if type(p) is torch.nn.Parameter and "_fsdp_flattened" not in p.__dict__:
        return {}
    if getattr(p, "_fsdp_flattened", False):
        return {0: (None, None)}
    mesh = getattr(p, "device_mesh", None)
    found: dict[int, Group] = {}
    for dim, placement in enumerate(getattr(p, "placements", ())):
        if mesh is not None and not placement.is_replicate():
            group = mesh.get_group(dim)
            found[id(group)] = (group, torch.device(mesh.device_type))
    return found


def local_values(gradient: Tensor) -> Tensor:
    """The dense, real tensor with the values of this rank."""
    if hasattr(gradient, "to_local"):
        gradient = gradient.detach().to_local()  # type: ignore[attr-defined]
    if gradient.is_sparse:
        gradient = gradient.coalesce()._values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


__all__ = [
    "any_nonzero", "any_of", "find_nonfinite", "found_after_backward", "infinities_to_nan", "local_values", "several_ranks", "sharing",
]  # fmt: skip
