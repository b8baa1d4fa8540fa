"""One captured graph on its way through the passes: the op graph, what has been decided so far, and the fx graph to edit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch.fx

from amprewrite.ir.cost import CostModel, Timings
from amprewrite.ir.evidence.keep_high import Careful
from amprewrite.ir.evidence.ranges import Calibration
from amprewrite.ir.op_calls import Call
from amprewrite.ir.op_graph import OpGraph
from amprewrite.ir.plans.pad_plan import PadPlan
from amprewrite.ir.plans.plan import Candidate, Cast, NodePlan, RegionPlan
from amprewrite.ir.policies.pad_policy import PadPolicy
from amprewrite.ir.policies.policy import Policy
from amprewrite.tables.devices import Device, device_row
from amprewrite.tables.ops.op_lists import OpLists
from amprewrite.tables.vocabulary import Colour, Reason


@dataclass(frozen=True)
class Paint:
    """A colour with its reason, the node that caused it, and a word more."""

    colour: Colour
    reason: Reason
    because_of: str = ""
    detail: str = ""


@dataclass
class Program:
    """What passes hand on. Deciding passes write `paints` and `casts`; applying passes edit `module` as the plan says."""

    graph: OpGraph
    policy: Policy
    lists: OpLists
    name: str = "graph"
    entry: str = ""
    training: bool = False
    scale_loss: bool = False
    """Whether loss scaling is built into the graph."""
    fold_masks: Literal["", "fixed", "any"] = ""
    """Whether attention masks made of sizes alone may go: never, where the sizes are fixed, or whatever they are."""
    device: str = "cpu"
    planned_for: Device | None = None
    """The device to plan for; None: the one at hand."""
    timings: Timings | None = None
    """Measured prices; None: the device table's."""
    paints: dict[str, Paint] = field(default_factory=dict)
    casts: tuple[Cast, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    """Nodes whose ops refused low inputs when tried, with what they said."""
    pad: PadPolicy | None = None
    """What may be padded; None: nothing."""
    calls: dict[str, Call] = field(default_factory=dict)
    """How every op was called; read only where something may be padded."""
    pads: PadPlan = field(default_factory=PadPlan)
    pad_refused: dict[str, str] = field(default_factory=dict)
    """Nodes whose ops refused padded inputs when tried, with what they said."""
    pads_off: bool = False
    """Padding was tried and did not work out."""
    parts: dict[torch.fx.Node, Program] = field(default_factory=dict)
    """Programs of the bodies of activation checkpoints, where somebody runs them one by one."""
    left_bodies: dict[str, str] = field(default_factory=dict)
    """Graphs inside this one that stay as they are, and why; "": all of them."""
    by_autocast: Program | None = None
    """The same graph read by torch.autocast's lists, where somebody compares."""
    tried: bool = False
    """Whether a plan of it was tried on fake tensors already."""
    has_bodies: bool = False
    """Whether it holds graphs that are planned by themselves."""
    notes: list[str] = field(default_factory=list)
    given: RegionPlan | None = None
    """A plan to follow instead of deciding."""
    candidates: tuple[Candidate, ...] = ()
    """What the plan was weighed against, itself first."""
    calibration: Calibration | None = None
    """What the model's values were on sample batches."""
    careful: Careful | None = None
    """Nodes to keep high for accuracy's sake."""
    magnitudes: dict[str, float] = field(default_factory=dict)
    """Largest magnitude of each parameter and buffer, where the low format's range is narrow."""
    match_given: Callable[[Program], RegionPlan] | None = None
    """Finds the plan to follow for a graph inside this one."""
    module: torch.fx.GraphModule | None = None
    fx_nodes: dict[str, torch.fx.Node] = field(default_factory=dict)
    """The fx node of each vertex."""

    def paint(self, name: str, colour: Colour, reason: Reason, because_of: str = "", detail: str = "") -> None:
        self.paints[name] = Paint(colour, reason, because_of, detail)

    @property
    def colours(self) -> dict[str, Colour]:
        return {name: paint.colour for name, paint in self.paints.items()}

    @property
    def costs(self) -> CostModel:
        """The prices that this program is planned with."""
        row = self.planned_for or device_row(self.device)
        kept, together = self.policy.cache_weights == "step", self.policy.cache_weights is True
        return CostModel(row, self.policy.low, self.training, kept, self.timings, self.policy.memory, together)

    def region_plan(self) -> RegionPlan:
        """Freeze what was decided."""
        low = self.policy.low.name
        nodes = []
        for node in self.graph:
            paint = self.paints[node.name]
            dtype = low if paint.colour is Colour.LOW and node.carries_fp32 else node.dtype
            nodes.append(
                NodePlan(
                    node.name, node.op, paint.colour, paint.reason, paint.because_of, paint.detail, node.kind, dtype, node.shape,
                    node.flops, node.module, node.source, node.role, tuple(o.value for o in node.operands),
                )
            )
        notes, priced_on = tuple(self.notes), self.costs.place if self.candidates else ""
        if self.given is not None:
            priced_on = self.given.priced_on
        return RegionPlan(
            self.name, tuple(nodes), self.casts, self.training, notes, self.entry, basis=self.undecided(),
            candidates=self.candidates, priced_on=priced_on, pads=self.pads,
        )

    def undecided(self) -> Program:
        """All that the deciding passes look at, with nothing decided and no fx graph: enough to decide again."""
        return replace(
            self, paints={}, casts=(), notes=[], refused=dict(self.refused), candidates=(), module=None, fx_nodes={}, match_given=None,
            pads=PadPlan(), pads_off=True,
        )

    def note(self, text: str) -> None:
        """Add a line to the notes of the plan, once."""
        if text not in self.notes:
            self.notes.append(text)

    def keep_high(self, name: str, why: str) -> None:
        """Remember that a node must run high whatever the lists say, and forget what was decided."""
        self.refused[name] = why
        self.paints, self.casts, self.candidates, self.pads = {}, (), (), PadPlan()


