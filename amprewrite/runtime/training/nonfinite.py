"""Check gradients for inf and NaN. The results are overflow flags on the device, on which several ranks can agree.

A flag is a 0-dim fp32 tensor: 0 if all values are finite, above 0 otherwise. Gradients are checked twice:

1. Before an optimizer steps, by `find_nonfinite`. All ranks that hold shards of the same parameters get the same flag.
2. At the end of a backward, by `found_after_backward`, before the training loop can hide an infinity (`clip_grad_value_`, `nan_to_num_`).
   This check makes no collective call, because ranks may run different backward passes. Its flag for sharded gradients is shared with the
   other ranks before the step. Its flag for unsharded gradients is not shared. So if several ranks train, infinities in these gradients
   are turned into NaN: a clamp keeps NaN, and when the ranks average the gradients, all get NaN. Check 1 then finds it on every rank.
   The flag for unsharded gradients is used only if the loop discards the gradients, so that no step checks them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amprewrite.graphs.fx.ops.on_device import local_part, on_device, recording
from amprewrite.runtime.options import several_ranks
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import NARROW_DTYPES
from amprewrite.torch_internals.kernels import norms_of_tensors, unscale_and_check

_PARAMS, _GRAD, _DTYPE = operator.itemgetter("params"), operator.attrgetter("grad"), operator.attrgetter("dtype")
_THERE = functools.partial(operator.is_not, None)

Group = tuple[Any, torch.device | None]
"""(process group, device on which its collectives run). The group None means all ranks; the device None means any device."""


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of `optimizer`."""
    return list(chain.from_iterable(map(_PARAMS, optimizer.param_groups)))


def find_nonfinite(params: Sequence[Tensor], noted: Sequence[Tensor] = (), beside: Iterable[Any] = ()) -> Tensor | None:
    """Return the overflow flag of a step: above 0 if a gradient of `params` holds inf or NaN, or if an earlier flag in `noted` is above 0.

    Returns None without `params`, or if there are no gradients and no groups. Raises PolicyError for fp16 gradients: weights must be fp32.

    Each rank checks its own shards. Then an all-reduce over each process group takes the maximum of the flags of its ranks. All ranks take
    part, even without gradients. The groups are those over which `params` are sharded, and those in `beside`: each rank of such a group
    steps another part of the model, and all skip a step together. DDP averages unsharded gradients, so they need no all-reduce.
    """
    groups = dict[int, Group]()
    for group in beside:
        groups[id(group)] = group, None
    for shared in sharing(params).values():
        groups |= shared
    gradients = list(filter(_THERE, map(_GRAD, params)))
    if not NARROW_DTYPES.isdisjoint(map(_DTYPE, gradients)):
        narrow = next(gradient for gradient in gradients if gradient.dtype in NARROW_DTYPES)
        raise PolicyError(
            f"the gradient of a parameter of shape {tuple(narrow.shape)} is fp16, in which small updates are lost; "
            "keep the parameters in fp32 (model.float()): they are the master weights"
        )
    if not params or not (gradients or groups):
        return None
    with torch.inference_mode(False), torch.no_grad():
        start = None if not noted else any_of(noted) if len(noted) > 1 else noted[0].clone()  # clone: `_flag_for` writes to `start`
        found = _flag_for(gradients, start)
        if found is None:
            found = _flag(0.0, params[-1].device)
        for group, on in groups.values():
            sent = found if on is None else found.to(on)
            torch.distributed.all_reduce(sent, op=torch.distributed.ReduceOp.MAX, group=group)
            found = sent.to(found.device)
    return found


def found_after_backward(params: Sequence[Tensor], apart: bool) -> tuple[Tensor | None, Tensor | None]:
    """Check the gradients of `params` on this rank, and return two overflow flags: above 0 for inf or NaN, None without gradients to check.

    On a single rank the first flag covers all gradients, and the second is None. If several ranks train, the first flag covers sharded
    gradients, and infinities in unsharded gradients become NaN, in place. If `apart` is True, the second flag covers the unsharded
    gradients; otherwise it is None. It is also None while a CUDA graph is being recorded.
    """
    dense: list[Tensor] = []
    kept = list(filter(_THERE, map(_GRAD, params)))
    if several_ranks():
        shared = sharing(params)
        dense = [p.grad for p in params if p.grad is not None and id(p) not in shared]
        kept = [p.grad for p in params if p.grad is not None and id(p) in shared]
    with torch.inference_mode(False), torch.no_grad():
        if dense:
            infinities_to_nan(dense)
        return _flag_for(kept), _flag_for(dense) if apart and dense and not recording(dense[0].device) else None


def infinities_to_nan(gradients: Iterable[Tensor]) -> None:
    """Turn infinities into NaN, in place. Skip gradients that require gradients: a graph of `create_graph=True` may have saved them."""
    buckets: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if not gradient.requires_grad and gradient.numel():
            values = gradient._values() if gradient.is_sparse else gradient  # `coalesce` would return a copy: writes to it would be lost
            values = local_values(values)
            buckets[values.device, values.dtype].append(values)
    for values_of_a_kind in buckets.values():
        torch._foreach_lerp_(values_of_a_kind, values_of_a_kind, 0.0)  # x + 0 * (x - x): x itself if it is finite, otherwise NaN


def any_of(flags: Sequence[Tensor]) -> Tensor:
    """Return the maximum of `flags` on the device of the first. A sum may exceed 1, and fused Adam subtracts the flag from its steps."""
    where = flags[0].device
    return flags[0] if len(flags) == 1 else torch.stack([on_device(flag, where) for flag in flags]).amax()


def any_nonzero(gradients: Iterable[Tensor]) -> Tensor:
    """Return 1 if a gradient holds a number other than 0 on this rank, NaN included, and 0 otherwise.

    The result is a 0-dim fp32 tensor on the device of the first gradient.
    """
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


def _flag_for(gradients: Iterable[Tensor], start: Tensor | None = None) -> Tensor | None:
    """Return an overflow flag: above 0 if one of `gradients` is not finite, or if the flag `start` is above 0. May write to `start`.

    Returns None if there are no gradients and `start` is None.
    """
    buckets: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    flags: list[Tensor] = []
    for gradient in gradients:
        if gradient.requires_grad:  # the gradient was made with `create_graph=True`, so the kernel below must not write to it
            flags.append((~local_values(gradient.detach()).isfinite().all()).float())
            continue
        if type(gradient) is not Tensor or gradient.is_sparse or gradient.dtype != torch.float32:
            gradient = local_values(gradient)
        buckets[gradient.device, gradient.dtype].append(gradient)
    found: dict[torch.device, Tensor] = {} if start is None else {start.device: start}
    for (where, _), members in buckets.items():
        if where not in found:
            found[where] = torch.zeros((), dtype=torch.float32, device=where)
        one = _kept_one(where) if where.type != "cuda" or not recording(where) else _flag(1.0, where)
        unscale_and_check(members, found[where], one)
    flags = [*found.values(), *flags]
    return (any_of(flags) if len(flags) > 1 else flags[0]) if flags else None


def _flag(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


@functools.cache
def _kept_one(device: torch.device) -> Tensor:
    """Return a 0-dim tensor 1.0 on `device` that all callers share. Do not write to it. Do not call this while a CUDA graph is recorded."""
    return _flag(1.0, device)


def sharing(params: Iterable[Tensor]) -> dict[int, dict[int, Group]]:
    """Return the process groups over which parameters are sharded: {id of the parameter: {id of the group: `Group`}}.

    Parameters in `params` that are not sharded have no entry.
    """
    special = [p for p in params if type(p) is not torch.nn.Parameter or "_fsdp_flattened" in p.__dict__]
    return {id(p): groups for p in special if (groups := _groups_of(p))} if special else {}


def _groups_of(p: Tensor) -> dict[int, Group]:
    """Return {id: `Group`} for the process groups over which `p` is sharded: a DTensor's mesh groups, or all ranks (id 0) for FSDP1."""
    if getattr(p, "_fsdp_flattened", False):
        return {0: (None, None)}
    mesh = getattr(p, "device_mesh", None)
    found: dict[int, Group] = {}
    for dim, placement in enumerate(getattr(p, "placements", ())):
        if mesh is not None and not placement.is_replicate():
            group = mesh.get_group(dim)
            found[id(group)] = (group, torch.device(mesh.device_type))
    return found


def is_finite(gradient: Tensor) -> bool:
    """True if all values of `gradient` on this rank are finite. Waits for the device."""
    return bool(local_values(gradient.detach()).isfinite().all())


def local_values(gradient: Tensor) -> Tensor:
    """Return the values of `gradient` on this rank as a dense, real tensor.

    The result is the local shard of a DTensor, the summed values of a sparse tensor, or a view of a complex tensor as pairs of real
    numbers. If a complex tensor is conjugated lazily, the view shows the stored numbers: imaginary parts with the opposite sign.
    """
    gradient = local_part(gradient)
    if gradient.is_sparse:
        gradient = gradient.coalesce()._values()
    if gradient.is_conj():
        gradient = gradient.conj()  # `resolve_conj` would return a copy: writes to it would be lost
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
