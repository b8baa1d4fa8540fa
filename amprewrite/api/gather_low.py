"""Have FSDP2 gather weights in the low format if the graphs read them only in this format.

A graph casts such a weight to the low format before any other op. So each rank may round its shard before sending it: the gathered
fp32 weight then holds rounded values, and the cast gives the same bits. Gradients are still computed and reduced in fp32, and the
shards that optimizers and checkpoints see stay fp32.

1. `LowGather` replaces FSDP's all-gather for one sharded module, through `FSDPModule.set_custom_all_gather`.
2. `LowGather` sends the low format only if FSDP gathers for a forward or a backward, and frees the gathered weights afterwards. If the
   user calls `unshard()`, weights are gathered in fp32.
3. All ranks must send a weight in the same format. So they agree on it in each call of `gather_low`, and no rank changes it alone.
4. `GatheredLow` checks each call of a module. If code may read rounded weights without a cast to the low format, the call raises an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from amprewrite.runtime.model.rewritten import RewrittenBase, session_of
from amprewrite.runtime.options import fsdp_groups
from amprewrite.runtime.session import Session
from amprewrite.runtime.weights.weight_reads import RoundedRead, WeightReads
from amprewrite.tables.errors import PlanError, PolicyError
from amprewrite.tables.formats import FP32, LOW_FORMATS, Format
from amprewrite.torch_internals.kernels import copy_tensors

ANOTHER_RANK = "another rank needs it in fp32"


@dataclass(frozen=True)
class LowGathers:
    """Result of `gather_low`: which weights are gathered in the low format, which in fp32 and why, and the bytes of all gathers."""

    format: str
    """Name of the low format."""
    low: tuple[str, ...]
    """Names of the weights that are gathered in the low format."""
    full: dict[str, str]
    """Names of the weights that are gathered in fp32, each with the reason."""
    bytes_before: int
    """Bytes of all gathered weights on a rank if all were fp32."""
    bytes_now: int
    """Bytes of all gathered weights on a rank in the formats in which they are gathered now."""

    def __str__(self) -> str:
        weights = len(self.low) + len(self.full)
        lines = [
            f"{len(self.low)} of {weights} sharded weights travel as {self.format}: "
            f"{self.bytes_now:,} bytes a gather of all, {self.bytes_before:,} in fp32"
        ]
        reasons = dict.fromkeys(self.full.values())
        for why in reasons:
            names = [name for name, reason in self.full.items() if reason == why]
            some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            lines.append(f"  fp32: {some}: {why}")
        return "\n".join(lines)


def gather_low(amp: nn.Module) -> LowGathers:
    """Have FSDP2 gather weights in the low format if graphs read them only in this format. Outputs and gradients stay bitwise the same.

    Call this function on all ranks, after one step has captured the graphs: rewrite with granularity="blocks", `fully_shard` each block,
    then train a step. A weight is gathered low if its module is captured whole, and every graph so far casts the weight to the low
    format. Shards, gradients, optimizers and checkpoints stay fp32.

    A later call that would read a rounded weight in fp32 (from a new graph, code outside the graphs, or a hook) raises CaptureError.
    Then call this function again on all ranks, and the weight is gathered in fp32. The result lists the weights with their formats.

    Raises PolicyError if the model is not rewritten or not sharded by FSDP2; PlanError if no graph has run yet or the model runs in fp32.
    """
    if not isinstance(amp, RewrittenBase):
        raise PolicyError(f"gather_low takes a rewritten model, not {type(amp).__name__}; pass what amprewrite.rewrite returned")
    session = session_of(amp)
    found = list(sharded_modules(amp))
    if not found:
        raise PolicyError("nothing in this model went through fully_shard; gather_low serves FSDP2 alone, and comes after it")
    if not session.last:
        raise PlanError("no graph has run yet; train a step on all ranks, then call gather_low")
    low = session.policy.low
    if low is FP32:
        raise PlanError("this model runs in fp32 (amp.plan says why), so nothing can travel low")
    gathers: dict[str, LowGather] = {}
    full: dict[str, str] = {}
    sizes = [0, 0]
    for each in found:
        if isinstance(each, str):
            full[each] = "fully_shard took it in a list with other modules, or on several meshes"
            continue
        reasons = why_full(session, each)
        agreed = agree(each.group, [not why for why in reasons], low)
        left = zip(each.names, reasons, agreed, strict=True)
        full |= {names[0]: why or ANOTHER_RANK for names, why, is_low in left if not is_low}
        count = each.group._all_gather_process_group.size()
        sizes[0] += count * sum(each.numels) * FP32.bytes
        sizes[1] += count * sum(numel * (low.bytes if ok else FP32.bytes) for numel, ok in zip(each.numels, agreed, strict=True))
        if each.group.is_unsharded:
            each.module.reshard()  # drop the gathered weights, which may still be rounded after a call that raised an error
        if any(agreed):
            gathers[each.path] = LowGather(each, agreed, low)
            each.module.set_custom_all_gather(gathers[each.path])
        elif isinstance(each.group._all_gather_comm, LowGather):
            each.module.set_custom_all_gather(full_gather(each.group))
    gathered = GatheredLow(gathers)
    session.checks.graphs, session.checks.calls = (gathered.check_reads,), (gathered.check_call,)
    report = LowGathers(low.name, tuple(name for gather in gathers.values() for name in sorted(gather.names)), full, *sizes)
    session.note(f"gather_low: {str(report).partition(chr(10))[0]}")
    return report


def why_full(session: Session, sharded: Sharded) -> list[str]:
    """Return, for each weight of a sharded module, the reason why this rank needs it in fp32; "" if the low format is enough."""
    why = sharded.cannot() or _not_in_one_graph(session, sharded)
    if why:
        return [why] * len(sharded.names)
    in_fp32 = {name: region.place for region in session.regions for name in region.reads.full}
    low = {name for region in session.regions for name in region.reads.low}
    found = []
    for names in sharded.names:
        place = next((in_fp32[name] for name in names if name in in_fp32), "")
        found.append(f"{place} reads it in fp32" if place else "" if low.intersection(names) else "no graph has read it yet")
    return found


def _not_in_one_graph(session: Session, sharded: Sharded) -> str:
    """Return the reason why code outside the module's graphs may read its weights; "" if no other code can."""
    entry = session.entries.get(sharded.path)
    place = f"{sharded.path or 'the model'}"
    if entry is None or not entry.captured:
        return f"{place} is no part that is captured by itself; rewrite(..., granularity='blocks'), then fully_shard each part"
    if not entry.graphs.regions:
        return f"{place} has not run yet"
    if entry.graphs.left_out or not all(region.whole for region in entry.graphs.regions):
        return f"{place} has code outside its graph (amp.plan.skipped has it)"
    return "hooks of others on it see its weights" if own_hooks(sharded.module) else ""


_SENT_LOW = ("FORWARD", "PRE_BACKWARD")
"""FSDP's names of the training states in which it gathers weights for a forward or a backward."""
AGAIN = "call amprewrite.gather_low(amp) on all ranks and repeat the call: the ranks agree anew, and what is read in fp32 travels so"
"""Advice for error messages: how to let the ranks agree anew on the format of each weight."""


@dataclass(frozen=True)
class Sharded:
    """A module that `fully_shard` was called on, and `group`, the FSDP object that gathers its weights."""

    path: str
    module: Any
    group: Any
    names: tuple[tuple[str, ...], ...]
    """For each weight, all its paths (a tied weight has several). The weights are in the order in which FSDP gathers them."""

    @property
    def numels(self) -> tuple[int, ...]:
        """The number of elements that this rank sends of each weight."""
        return tuple(each.padded_sharded_param_size.numel() for each in self.group.fsdp_params)

    def cannot(self) -> str:
        """Return the reason why an all-gather cannot send the weights of this module in the low format; "" if it can."""
        group = self.group
        if group.mp_policy.param_dtype is not None:
            return "its MixedPrecisionPolicy casts weights already"
        if any(each.orig_dtype is not FP32.dtype or each.is_dtensor for each in group.fsdp_params):
            return "its weights are not all plain fp32 tensors"
        if not frees_after_forward(group):
            return "its weights stay gathered after the forward, where any code may read them; fully_shard(..., reshard_after_forward=True)"
        return ""


def frees_after_forward(group: Any) -> bool:
    """True if FSDP frees the gathered weights of `group` after each forward and each backward."""
    return bool(group._reshard_after_forward and not group._use_post_forward_mesh and group.reshard_after_backward)


def own_hooks(module: Any) -> bool:
    """True if the module has forward hooks other than FSDP's hooks. Such hooks see the gathered weights."""
    state = module._get_fsdp_state()
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(getattr(hook, "__self__", None) is not state for hook in hooks)


def sharded_modules(root: nn.Module) -> Iterator[Sharded | str]:
    """Yield a `Sharded` for each module under `root` that went through `fully_shard`.

    Yield only the path if the module has several groups of weights, or shares a group with other modules.
    """
    paths: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    for module, (path, *_) in paths.items():
        groups = fsdp_groups(module)
        if len(groups) > 1 or any(len(group.modules) > 1 for group in groups):
            yield path
        elif groups:
            yield Sharded(path, module, groups[0], tuple(_names(each, paths) for each in groups[0].fsdp_params))


def _names(parameter: Any, paths: Mapping[nn.Module, list[str]]) -> tuple[str, ...]:
    """Return all paths of one FSDP parameter. A tied parameter has several paths. `paths` has the paths of each module."""
    info = parameter._module_info
    owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    return tuple(f"{path}.{name}".lstrip(".") for module, name in owners for path in paths.get(module, ()))


def agree(group: Any, low: list[bool], fmt: Format) -> list[bool]:
    """Return for each weight of `group` whether all ranks may send it in the low format. All ranks must make this call together.

    `low`: whether this rank may send each weight in the format `fmt`. If ranks have different formats, the answer is False for all weights.
    """
    import torch.distributed

    kind = LOW_FORMATS.index(fmt)
    said = torch.tensor([kind, -kind, *map(int, low)], dtype=torch.int32, device=group.device)
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=group._all_gather_process_group)
    least, most, *all_low = said.tolist()
    return [bool(each) and least == -most for each in all_low]


class LowGather:
    """An all-gather for FSDP that sends some weights of one module in the low format.

    `low`: for each weight, whether it is sent in the format `fmt`; the other weights are sent in fp32.
    """

    def __init__(self, sharded: Sharded, low: Iterable[bool], fmt: Format) -> None:
        self.sharded, self.fmt = sharded, fmt
        self.inner: Any = full_gather(sharded.group)
        """The all-gather that sends the bytes: FSDP's own, or the user's."""
        self.low = tuple(low)
        self.names = frozenset(name for names, is_low in zip(sharded.names, self.low, strict=True) if is_low for name in names)
        self.rounded = False
        """True if the gathered weights now hold rounded values."""

    def concerns_this_call(self) -> bool:
        """True if this call of the module may read rounded weights: they are rounded now, or backward may gather them in the low format."""
        return self.rounded or torch.is_grad_enabled()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of `size` elements for FSDP to gather into."""
        found: Tensor = self.inner.allocate(size, dtype=dtype, device=device)
        return found

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Gather `input_tensor` of all ranks into `output_tensor`. Both tensors are flat, in the dtype in which FSDP gathers.

        Returns None if weights were sent in the low format. Otherwise returns the result of `self.inner`, the all-gather of FSDP or of the
        user. If `async_op` is True, all weights are sent in fp32, because low weights must be converted to fp32 when the gather has ended.
        """
        self.rounded = not async_op and self._for_graphs(input_tensor)
        if not self.rounded:
            return self.inner(output_tensor, input_tensor, group, async_op)
        rows = output_tensor.view(group.size(), -1)
        spans = list(self._spans())
        words = input_tensor.element_size() // self.fmt.dtype.itemsize
        width = sum(length if low else length * words for low, _, length in spans)
        wire = self.inner.allocate((group.size() * width,), dtype=self.fmt.dtype, device=input_tensor.device).view(group.size(), width)
        mine = wire[group.rank()]
        copy_tensors(*_pairs(mine, input_tensor, spans, words))
        self.inner(wire.view(-1), mine, group, False)
        sources, targets = _pairs(wire, rows, spans, words)
        copy_tensors(targets, sources)
        return None

    def _for_graphs(self, sent: Tensor) -> bool:
        """True if FSDP gathers the fp32 weights `sent` for a forward or a backward and then frees them, so that only graphs read them."""
        group = self.sharded.group
        known = sent.dtype == FP32.dtype and sent.numel() == sum(self.sharded.numels)
        return known and group._training_state.name in _SENT_LOW and frees_after_forward(group)

    def _spans(self) -> Iterator[tuple[bool, int, int]]:
        """Yield (is low, first element, number of elements) for each run of consecutive weights that are sent in the same format."""
        start = 0
        for low, run in groupby(zip(self.low, self.sharded.numels, strict=True), key=lambda each: each[0]):
            length = sum(numel for _, numel in run)
            yield low, start, length
            start += length


def full_gather(group: Any) -> Any:
    """Return the all-gather that an FSDP group uses for fp32 weights: FSDP's own or the user's. If a LowGather wraps it, unwrap it."""
    found = group._all_gather_comm
    return found.inner if isinstance(found, LowGather) else found


def _pairs(wire: Tensor, flat: Tensor, spans: Iterable[tuple[bool, int, int]], words: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return (views of the communication buffer `wire`, views of the fp32 tensor `flat`). The n-th views of both hold the same weights.

    `spans` has the runs of weights that are sent in one format (see `LowGather._spans`). The buffer has the low dtype, so weights that are
    sent in fp32 are copied as bytes: each element takes the space of `words` low elements.
    """
    on_wire, elements, at = [], [], 0
    for is_low, start, length in spans:
        count = length if is_low else length * words
        part, of = wire[..., at : at + count], flat[..., start : start + length]
        on_wire.append(part if is_low else part.view(torch.uint8))
        elements.append(of if is_low else of.view(torch.uint8))
        at += count
    return on_wire, elements


class GatheredLow:
    """Holds the modules of a rewritten model that send weights in the low format. Checks that no code reads the rounded weights in fp32."""

    def __init__(self, gathers: dict[str, LowGather]) -> None:
        """`gathers`: {path of a module that sends weights in the low format: the object that sends them}."""
        self.gathers, self._of = gathers, {name: gather for gather in gathers.values() for name in gather.names}

    def check_reads(self, reads: WeightReads, place: str) -> None:
        """Raise RoundedRead if a graph that is about to run reads rounded weights in fp32. `place` names the graph in the message."""
        for name in reads.full:
            gather = self._of.get(name)
            if gather is not None and gather.concerns_this_call():
                raise RoundedRead(f"{place} reads {name} in fp32, and gather_low sends it as {gather.fmt.name}; {AGAIN}")

    def check_call(self, path: str, place: str, whole: bool) -> None:
        """Raise RoundedRead if code outside the graph of the module at `path`, or a hook, may have read rounded weights in this call.

        `whole` is True if one graph ran the module's whole forward, without graph breaks. `place` names the module in the message.
        """
        gather = self.gathers.get(path)
        if gather is None or not gather.concerns_this_call():
            return
        if own_hooks(gather.sharded.module):
            raise RoundedRead(f"{place} has forward hooks that see weights which gather_low sends rounded; {AGAIN}")
        if not whole:
            raise RoundedRead(f"{place} ran code outside its graph, which may read weights that gather_low sends rounded; {AGAIN}")
