"""Colour everything low that nothing keeps high: Apex's O2 and O3."""

from __future__ import annotations

from amprewrite.ir.pass_base import Pass
from amprewrite.ir.program import Program
from amprewrite.tables.vocabulary import Colour, Reason


class PaintForce(Pass):
    name = "paint-force"

    def call(self, program: Program) -> bool:
        if program.lists.rule != "force":
            return False
        open_nodes = [node.name for node in program.graph if node.name not in program.paints]
        for name in open_nodes:
            program.paint(name, Colour.LOW, Reason.FORCED)
        return bool(open_nodes)
