"""What the deciding passes look at: one captured graph, what is known of it, and what is asked for. Nothing here is decided."""

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
    """One graph to decide. Frozen: to add a fact, make another one with `dataclasses.replace`."""

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
    """Why all of this graph stays high, and the op that it is inside of; None if it need not."""
    block_size: int = 0
    """Elements of weights whose gradients may come back together; 0: the graph casts its weights itself."""
    fold_masks: Literal["", "fixed", "any"] = ""
    """Which attention masks may be dropped: none, those made of fixed sizes, or those that a call can tell as well."""
    masks: Mapping[str, Edit] = field(default_factory=dict)
    """What may be done to the masks of attention calls; read only if masks may be dropped."""
    repeated_heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Attention calls that read copies of heads, with the ops that copy; those that have no mask, or that `masks` has."""
    bare_norms: tuple[str, ...] = ()
    """Norms that keep their statistics in the dtype of what they read."""
    bare_taps: tuple[str, ...] = ()
    """Convolutions whose low backward leaves gradients unset of weights that meet padding alone."""
    small_steps: tuple[str, ...] = ()
    """Sums that go on with one value in many small steps, and what scales or copies that value in between."""
    trained: frozenset[str] = frozenset()
    """Values that a backward gives gradients."""
    read_by_many: tuple[str, ...] = ()
    """Values with gradients to which more ops give a share than a low format adds up well; weights are none of them."""
    matrix_products: Mapping[str, MatrixProduct] = field(default_factory=dict)
    """Products that fp8 kernels could run, by name; read only if some may."""
    held: Mapping[str, Held] = field(default_factory=dict)
    """How exact torch.autocast holds the inputs of a graph inside another, and the results of graphs inside this one."""
    needs_bits: frozenset[str] = frozenset()
    """Values whose rounding a graph around this one or inside it would magnify."""
    far_constants: tuple[str, ...] = ()
    """Ops with finite constants beyond the range of the low format among their arguments."""
    device: str = "cpu"
    planned_for: Device | None = None
    """The device to plan for; None: the one at hand."""
    timings: Timings | None = None
    """Measured prices; None: the device table's."""
    magnitudes: Mapping[str, float] = field(default_factory=dict)
    """Largest magnitude of each parameter and buffer, if the low format's range is narrow."""
    offsets: frozenset[str] = frozenset()
    """Weights that are added to something, and whose values have more in common than they differ by."""
    constants: tuple[ConstantRead, ...] = ()
    """Who reads the constants of an ONNX file, which are stored in the format in which they are read."""
    calibration: Calibration | None = None
    """What the model's values were on sample batches."""
    keep_high: KeepHigh | None = None
    """Nodes to keep high for accuracy's sake."""
    agreed: Agreed = NOTHING_AGREED
    """Colours that other graphs of the model have decided."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Nodes whose ops refused low inputs when tried, with what they said."""
    pad: PadPolicy | None = None
    """What may be padded; None: nothing."""
    calls: Mapping[str, Call] = field(default_factory=dict)
    """How every op was called; read only if something may be padded."""
    pad_refused: Mapping[str, str] = field(default_factory=dict)
    """Nodes whose ops refused padded inputs when tried, with what they said."""
    pads_off: bool = False
    """Padding was tried and did not work out."""
    given: RegionPlan | None = None
    """A plan to follow instead of deciding."""
    notes: tuple[str, ...] = ()
    """What was noticed while reading: the plan repeats it."""

    @property
    def costs(self) -> CostModel:
        """The prices that this graph is planned with."""
        return self.own_costs if self.policy.parity is None else replace(self.own_costs, training=self.policy.parity)

    @property
    def own_costs(self) -> CostModel:
        """The prices of this graph alone: of a step of training, or of a pass without gradients."""
        row = self.planned_for or device_row(self.device)
        kept, together = self.policy.cache_weights == "step", bool(self.policy.cache_weights)
        return CostModel(row, self.policy.low, self.training, kept, self.timings, self.policy.memory, together)

    @property
    def apart(self) -> Problem:
        """This graph as it would be decided if the model had no other."""
        return replace(self, policy=replace(self.policy, parity=None), agreed=NOTHING_AGREED)
