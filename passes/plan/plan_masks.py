"""Choose the attention calls that go without their mask: it says nothing, or is plainly causal.

1. Masks made of fixed sizes alone are known: those that are causal or allow all positions are dropped.
2. Masks made of sizes that change from call to call are looked up by them, if the graph runs without a compiler.
3. Other boolean masks on a CPU are looked at in every forward, if the graph runs without a compiler.

Models skip such masks themselves when nothing captures them. What is exported keeps its masks.
"""

from __future__ import annotations

from collections import Counter

from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.decisions import Decisions
from amprewrite.ir.problem import Problem
from amprewrite.tables.vocabulary import Edit

FIXED = (Edit.DROP_CAUSAL_MASK, Edit.DROP_FULL_MASK)


class PlanMasks(Pass[Problem, Decisions]):
    name = "plan-masks"

    def call(self, problem: Problem, decisions: Decisions) -> bool:
        found = {call: edit for call, edit in problem.masks.items() if edit in FIXED or problem.fold_masks == "any"}
        for call, edit in found.items():
            decisions.edit(problem, call, edit)
        for what, count in Counter(edit.what for edit in decisions.edits if edit.on and edit.node in found).items():
            decisions.note(f"{f'each of {count} attention calls' if count > 1 else 'an attention call'} {what.says}")
        return bool(found)
