"""The input of the deciding passes: one captured graph, the facts known about it, and the user's policy. Nothing here is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from amprewrite.ir.cost import CostModel, Timings
from amprewrite.ir.evidence.agreed import NOTHING_AGREED, Agreed
from amprewrite.ir.evidence.constants import ConstantRead
from amprewrite.ir.evidence.keep_high import KeepHigh
from amprewrite.ir.evidence.matrix_products import MatrixProduct
from amprewrite.ir.evidence.ranges import Calibration
from amprewrite.ir.op_calls import Call
from amprewrite.ir.op_graph import OpGraph
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.ir.policies.pad_policy import PadPolicy
from amprewrite.ir.policies.policy import Policy
from amprewrite.tables.devices import Device, device_row
from amprewrite.tables.ops.op_lists import OpLists
from amprewrite.tables.vocabulary import Edit, Held, Reason


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One graph to plan. Frozen: to add a fact, copy it with `dataclasses.replace`."""

    graph: OpGraph
    policy: Policy
    lists: OpLists
    name: str = "graph"
    entry: str = ""
    """Path of the module that was called, "" for the root."""
    training: bool = False
    scale_loss: bool = False
    """Whether loss scaling is built into the graph."""
    inside_scaled: bool = False
    """Whether loss scaling is built into a graph around this one."""
    kept_high: tuple[Reason, str] | None = None
    """Why this whole graph stays high, and the op whose body it is; None if it may run low."""
    block_size: int = 0
    """Most elements of weights in one gradient block; 0 if the graph casts its weights itself."""
    fold_masks: Literal["", "fixed", "any"] = ""
    """Attention masks that may be dropped: none, masks of fixed sizes, or also masks that a call can judge."""
    masks: Mapping[str, Edit] = field(default_factory=dict)
    """Edits allowed on the masks of attention calls; empty unless masks may be dropped."""
    repeated_heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Attention calls that read copies of heads, each with the ops that copy. Such a call has no mask, or a mask in `masks`."""
    bare_norms: tuple[str, ...] = ()
    """Norms that compute their statistics in the dtype of their input."""
    bare_taps: tuple[str, ...] = ()
    """Convolutions whose low backward leaves gradients uninitialised for weights that meet padding alone."""
    small_steps: tuple[str, ...] = ()
    """Sums that update one value in many small steps, and the ops between them that scale or copy it."""
    trained: frozenset[str] = frozenset()
    """Values that receive gradients in a backward."""
    read_by_many: tuple[str, ...] = ()
    """Values whose gradient is a sum of more terms than a low format adds up accurately. Weights are not among them."""
    matrix_products: Mapping[str, MatrixProduct] = field(default_factory=dict)
    """Products that fp8 kernels could run, by name; empty unless fp8 was asked for."""
    held: Mapping[str, Held] = field(default_factory=dict)
    """How exactly torch.autocast holds the inputs of a graph inside another, and the results of graphs inside this one."""
    needs_bits: frozenset[str] = frozenset()
    """Values whose rounding error a graph around this one or inside it would magnify."""
    far_constants: tuple[str, ...] = ()
    """Ops with an argument that is a finite constant beyond the low format's range."""
    device: str = "cpu"
    planned_for: Device | None = None
    """The device to plan for; None for the device at hand."""
    timings: Timings | None = None
    """Measured prices; None for the prices of the device table."""
    magnitudes: Mapping[str, float] = field(default_factory=dict)
    """Largest magnitude of each parameter and buffer, if the low format's range is narrow."""
    offsets: frozenset[str] = frozenset()
    """Weights that are summands and have an offset: the mean of a row is larger than its spread."""
    constants: tuple[ConstantRead, ...] = ()
    """Reads of the constants of an ONNX file. A constant is stored in the format of its readers."""
    calibration: Calibration | None = None
    """Ranges of the model's values on sample batches."""
    keep_high: KeepHigh | None = None
    """Nodes to keep high for accuracy."""
    agreed: Agreed = NOTHING_AGREED
    """Colours that other graphs of the model have decided."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Nodes whose ops refused low inputs when tried, each with the error message."""
    pad: PadPolicy | None = None
    """The rules for padding; None if nothing may be padded."""
    calls: Mapping[str, Call] = field(default_factory=dict)
    """The recorded call of every op; empty unless padding may happen."""
    pad_refused: Mapping[str, str] = field(default_factory=dict)
    """Nodes whose ops refused padded inputs when tried, each with the error message."""
    pads_off: bool = False
    """Whether padding was tried and failed."""
    given: RegionPlan | None = None
    """A plan to follow instead of deciding."""
    notes: tuple[str, ...] = ()
    """Notes from reading the graph. The plan repeats them."""

    @property
    def costs(self) -> CostModel:
        """The prices with which this graph is planned."""
        return self.own_costs if self.policy.parity is None else replace(self.own_costs, training=self.policy.parity)

    @property
    def own_costs(self) -> CostModel:
        """The prices of this graph alone: for a training step, or for a pass without gradients."""
        row = self.planned_for or device_row(self.device)
        kept, together = self.policy.cache_weights == "step", bool(self.policy.cache_weights)
        return CostModel(row, self.policy.low, self.training, kept, self.timings, self.policy.memory, together)

    @property
    def apart(self) -> Problem:
        """The same problem as if the model had no other graph."""
        return replace(self, policy=replace(self.policy, parity=None), agreed=NOTHING_AGREED)
