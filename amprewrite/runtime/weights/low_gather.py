"""Make FSDP2's all-gather send a weight in the low format if every graph reads the weight in the low format only.

A graph casts such a weight to the low format before any other op. So each rank may round its shard before sending it: the gathered
fp32 weight then holds rounded values, and the cast gives the same bits. Gradients are still computed and reduced in fp32, and the
shards that optimizers and checkpoints see stay fp32.

1. `LowGather` replaces FSDP's all-gather for one sharded module, through `FSDPModule.set_custom_all_gather`.
2. `LowGather` sends low only in gathers that FSDP makes for a forward or a backward and frees afterwards. If the user calls `unshard()`,
   weights are gathered in fp32.
3. All ranks must send the same format. So the ranks agree once, in `agree`, and decide nothing later.
4. `GatheredLow` checks each call: a call that reads rounded weights in another way raises an error before its result is returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from amprewrite.runtime.parts import fsdp_groups
from amprewrite.runtime.weights.weight_reads import RoundedRead, WeightReads
from amprewrite.tables.formats import FP32, LOW_FORMATS, Format
from amprewrite.torch_internals.kernels import copy_tensors

_SENT_LOW = ("FORWARD", "PRE_BACKWARD")
"""FSDP's names of the training states in which it gathers weights for a forward or a backward."""
AGAIN = "call amprewrite.gather_low(amp) on all ranks and repeat the call: the ranks agree anew, and what is read in fp32 travels so"
"""Advice for messages: how to correct the agreement of the ranks."""


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
    """Return all paths of one of FSDP's parameters, which may be tied. `paths` has the paths of each module."""
    info = parameter._module_info
    owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    return tuple(f"{path}.{name}".lstrip(".") for module, name in owners for path in paths.get(module, ()))


def agree(group: Any, low: list[bool], fmt: Format) -> list[bool]:
    """Return for each weight of `group` whether all ranks may send it low. All ranks must make this call together.

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
        """True if code of the running call may read rounded values of these weights: now, or after the gather for the call's backward."""
        return self.rounded or torch.is_grad_enabled()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of `size` elements for FSDP to gather into."""
        found: Tensor = self.inner.allocate(size, dtype=dtype, device=device)
        return found

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Gather `input_tensor` of all ranks into `output_tensor`. Both tensors are flat, in the dtype in which FSDP gathers.

        Returns None after a low gather, otherwise the result of the inner all-gather. With `async_op` no weight is sent low.
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
        """True if FSDP gathers these fp32 weights for a forward or a backward, and frees them afterwards."""
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
    """Return the all-gather of an FSDP group that sends all weights in fp32: FSDP's own, or the user's."""
    found = group._all_gather_comm
    return found.inner if isinstance(found, LowGather) else found


def _pairs(wire: Tensor, flat: Tensor, spans: Iterable[tuple[bool, int, int]], words: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return two lists of views that correspond one to one: parts of `wire`, the buffer to send, and parts of `flat`, the fp32 weights.

    `spans` is from `_spans`. Weights that are not low are sent as the bits of fp32: an element takes the space of `words` low elements.
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
    """Holds the modules of one rewritten model whose weights are sent low, and checks that no code reads their rounded weights in fp32."""

    def __init__(self, gathers: dict[str, LowGather]) -> None:
        """`gathers`: for each module whose weights are sent low, by its path, the object that sends them."""
        self.gathers, self._of = gathers, {name: gather for gather in gathers.values() for name in gather.names}

    def check_reads(self, reads: WeightReads, place: str) -> None:
        """Raise RoundedRead if a graph that is about to run reads rounded weights in fp32. `place` names the code of the graph."""
        for name in reads.full:
            gather = self._of.get(name)
            if gather is not None and gather.concerns_this_call():
                raise RoundedRead(f"{place} reads {name} in fp32, and gather_low sends it as {gather.fmt.name}; {AGAIN}")

    def check_call(self, path: str, place: str, whole: bool) -> None:
        """Raise RoundedRead if code other than the module's graph may have read rounded weights of the module at `path`.

        `whole`: one graph ran in the call, and it is all of the module's forward. `place` names the module, for the message.
        """
        gather = self.gathers.get(path)
        if gather is None or not gather.concerns_this_call():
            return
        if own_hooks(gather.sharded.module):
            raise RoundedRead(f"{place} has forward hooks that see weights which gather_low sends rounded; {AGAIN}")
        if not whole:
            raise RoundedRead(f"{place} ran code outside its graph, which may read weights that gather_low sends rounded; {AGAIN}")
