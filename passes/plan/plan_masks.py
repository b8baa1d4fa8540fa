"""Plan faster attention calls: drop masks that are causal or allow all positions, skip repeated heads, and make masks contiguous.

1. A mask that is made of fixed sizes alone is known while planning. It is dropped if it is causal or allows all positions.
2. A mask may be made of sizes alone that change from call to call, such as the length of a text. If the graph runs without a compiler, the
   mask is examined once for each new set of sizes. Later calls with the same sizes look the answer up.
3. Any other boolean mask on a CPU is examined in every forward, if the graph runs without a compiler.
4. If the model repeats the heads of keys and values, a low-precision call that takes no mask in any forward reads the original heads, each
   for a group of query heads. This needs a GPU with flash attention (sm_80 and later). On a CPU heads stay repeated, because the kernel for
   groups adds up gradients in the low format.
5. Fused CUDA kernels refuse a mask whose rows are not contiguous in memory. Attention then multiplies in fp32, and keeps fp32 values for
   backward. So the call reads a contiguous copy of the mask. If the mask inherits its layout from an earlier value, that value is copied.

The Python code of many models skips such masks and repeats when it runs uncaptured. Exported graphs contain them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.devices import device_row
from amprewrite.tables.vocabulary import Colour, Edit

FIXED = (Edit.DROP_CAUSAL_MASK, Edit.DROP_FULL_MASK)
"""Edits that drop a mask that is known while planning."""


class PlanMasks(Pass[Problem, Decisions]):
    needs = ("masks", "repeated_heads", "strided_masks")

    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        found = {call: edit for call, edit in problem.masks.items() if edit in FIXED or problem.fold_masks == "any"}
        for call, edit in found.items():
            decisions.edit(problem, call, edit)
        found |= _group_heads(problem, decisions)
        _copy_strided(problem, decisions, found)
        for what, count in Counter(edit.what for edit in decisions.edits if edit.on and edit.node in found).items():
            decisions.note(f"{f'each of {count} attention calls' if count > 1 else 'an attention call'} {what.says}")


def _group_heads(problem: Problem, decisions: Decisions) -> dict[str, Edit]:
    """Let attention calls read keys and values before their heads are repeated, if this is faster and as exact. Return {call: edit}."""
    row = problem.planned_for or device_row(problem.device)
    if problem.device != "cuda" or not row.flash_attention:
        return {}
    without = {edit.node for edit in decisions.edits if edit.on and edit.what in FIXED}
    padded = {value.value.partition("#")[0] for value in decisions.pads.values}
    low = {name for name, paint in decisions.paints.items() if paint.colour is Colour.LOW} - padded
    chosen = [
        call for call, ways in problem.repeated_heads.items()
        if (call in without or call not in problem.masks) and low.issuperset((call, *ways))
    ]  # fmt: skip
    for call in chosen:
        decisions.edit(problem, call, Edit.GROUP_HEADS)
    return dict.fromkeys(chosen, Edit.GROUP_HEADS)


def _copy_strided(problem: Problem, decisions: Decisions, without: Container[str]) -> None:
    """Plan a contiguous copy of each mask that fused GPU kernels refuse, unless all its calls drop or test masks (`without`)."""
    if (problem.planned_for or device_row(problem.device)).type != "cuda":
        return
    for value, calls in problem.strided_masks.items():
        if not all(call in without for call in calls):
            decisions.edit(problem, value, Edit.CONTIGUOUS_MASK)
