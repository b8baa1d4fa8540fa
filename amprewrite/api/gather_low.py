"""Have FSDP2 gather weights in the low format if the graphs read them only in this format."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from amprewrite.runtime.model.rewritten import RewrittenBase, session_of
from amprewrite.runtime.session import Session
from amprewrite.runtime.weights.low_gather import GatheredLow, LowGather, Sharded, agree, full_gather, own_hooks, sharded_modules
from amprewrite.tables.errors import PlanError, PolicyError
from amprewrite.tables.formats import FP32

ANOTHER_RANK = "another rank needs it in fp32"


@dataclass(frozen=True)
class LowGathers:
    """Result of `gather_low`: the weights gathered low, the other weights with reasons, and the bytes of a gather of all weights."""

    format: str
    """Name of the low format."""
    low: tuple[str, ...]
    """Names of the weights that are gathered in the low format."""
    full: dict[str, str]
    """Names of the weights that are gathered in fp32, each with the reason."""
    bytes_before: int
    """Bytes of all gathered weights on a rank if all were fp32."""
    bytes_now: int
    """Bytes of all gathered weights on a rank in the formats that they have now."""

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
    """Have FSDP2 gather weights in the low format if the graphs read them low. Outputs and gradients stay bitwise the same.

    Call this function on all ranks, after one step has captured the graphs: rewrite with granularity="blocks", `fully_shard` each block,
    then train a step. A weight is gathered low if its module is captured whole, and every graph so far casts the weight to the low
    format. Shards, gradients, optimizers and checkpoints stay fp32.

    A later call that would read a rounded weight in fp32 (from a new graph, code outside the graphs, or a hook) raises CaptureError.
    Then call this function again on all ranks, and the weight is gathered in fp32. The result lists the weights with their formats.

    Raises PolicyError if the model is not rewritten or no part of it went through `fully_shard`, PlanError before the first step.
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
            each.module.reshard()  # drop gathered weights: after a call that raised, they may still be rounded
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
    """Return the reason why code outside the module's graphs may read its weights; "" if no such code may."""
    entry = session.entries.get(sharded.path)
    place = f"{sharded.path or 'the model'}"
    if entry is None or not entry.captured:
        return f"{place} is no part that is captured by itself; rewrite(..., granularity='blocks'), then fully_shard each part"
    if not entry.graphs.regions:
        return f"{place} has not run yet"
    if entry.graphs.left_out or not all(region.whole for region in entry.graphs.regions):
        return f"{place} has code outside its graph (amp.plan.skipped has it)"
    return "hooks of others on it see its weights" if own_hooks(sharded.module) else ""
