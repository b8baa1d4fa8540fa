"""The base class of passes, a function that runs a pipeline of passes, and the objects that deciding passes read and edit.

A pass reads one object and edits another. Deciding passes read a `Problem`: one captured graph, all that is known about its values and ops,
and the user's policy. They edit `Decisions`, which `freeze` turns into a `RegionPlan`. Applying passes read a `RegionPlan` and edit an fx
graph. So a deciding pass cannot change a graph, and an applying pass cannot decide.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import ClassVar, Generic, Literal, TypeVar

from amprewrite.ir.cost import CostModel, MatrixProduct, Measured
from amprewrite.ir.evidence.agreed import NOTHING_AGREED, Agreed
from amprewrite.ir.evidence.constants import ConstantRead
from amprewrite.ir.evidence.ranges import Calibration, KeepHigh
from amprewrite.ir.evidence.summands import Summands
from amprewrite.ir.op_graph import Call, OpGraph
from amprewrite.ir.plans.pad_plan import PadPlan
from amprewrite.ir.plans.plan import Cast, NodeEdit, NodePlan, RegionPlan
from amprewrite.ir.plans.product_plan import QuantisedProducts
from amprewrite.ir.policies.policy import PadPolicy, Policy
from amprewrite.tables.devices import Device, device_row
from amprewrite.tables.errors import AmpRewriteError, PassError
from amprewrite.tables.ops.op_lists import OpLists
from amprewrite.tables.vocabulary import Colour, Edit, Held, Reason

Read = TypeVar("Read")
"""Type of the object that a pass reads."""
Edited = TypeVar("Edited")
"""Type of the object that a pass edits."""


class Pass(Generic[Read, Edited]):
    """One step of a pipeline, which reads one object and edits another. A subclass does its work in `__call__`."""

    name: ClassVar[str]
    """Name of the pass in messages and in `amprewrite passes`: the name of its class in small letters, such as "repaint-by-cost"."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Attributes of the object that the pass reads, such as "policy.products". If none of them is set, the pass has nothing to do and is
    not called. () for a pass that always runs."""

    def __init_subclass__(cls) -> None:
        cls.name = re.sub("(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()

    def __call__(self, read: Read, edited: Edited) -> None:
        """Read `read` and edit `edited` in place. Subclasses define this. They raise PassError if an object is not ready for the pass."""
        raise PassError(f"{type(self).__name__} does nothing: it has no __call__ method")


def run_passes(passes: Sequence[Pass[Read, Edited]], read: Read, edited: Edited, where: str = "graph") -> None:
    """Run the passes in order, except passes that have nothing to do (see `Pass.needs`). `where` is the graph's name in error messages.

    An unexpected exception becomes a PassError that names the pass and the passes that ran before it.
    """
    for place, each in enumerate(passes):
        if each.needs and not any(attrgetter(name)(read) for name in each.needs):
            continue
        before = ", ".join(earlier.name for earlier in passes[:place]) or "nothing"
        with failing_as_pass(f"pass {each.name}", f" on {where} after {before}"), no_collection():
            each(read, edited)


@contextmanager
def failing_as_pass(what: str, where: str = "") -> Iterator[None]:
    """Turn an unexpected exception of the `with` block into a PassError ("`what` failed `where`"); amprewrite's own errors pass through.

    The caller can then leave the graph in fp32 with a warning, so that a bug in a pass does not end a training run.
    """
    try:
        yield
    except AmpRewriteError:
        raise
    except Exception as error:
        raise PassError(f"{what} failed{where}: {type(error).__name__}: {error}") from error


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch Python's cycle collector off inside the `with` block, for all threads.

    The collector would scan a growing graph again and again, so that the time would grow faster than the graph. After the block, even
    if the block raises, the collector is switched on again if it was on before. It then collects the garbage cycles of the block.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One graph to plan, with all that is known about its values and ops. Frozen: to change a field, use `dataclasses.replace`."""

    graph: OpGraph
    policy: Policy
    lists: OpLists
    name: str = "graph"
    entry: str = ""
    """Path of the module whose call was captured, "" for the root."""
    training: bool = False
    scale_loss: bool = False
    """Whether loss scaling is built into the graph."""
    inside_scaled: bool = False
    """Whether this graph is a subgraph of a graph into which loss scaling is built."""
    kept_high: tuple[Reason, str] | None = None
    """Set if this graph is the body of an op, such as a loop, and stays fp32 as a whole: (reason, name of the op). Otherwise None."""
    fold_masks: Literal["", "fixed", "any"] = ""
    """Which attention masks may be dropped. "": none. "fixed": masks that are computed from fixed sizes alone. "any": also masks that are
    examined during a call, which is possible only if no compiler runs the graph."""
    masks: Mapping[str, Edit] = field(default_factory=dict)
    """Name of an attention call → the edit that would drop its mask, always or in some forwards. Empty if `fold_masks` is ""."""
    repeated_heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of an attention call → ops that repeat the heads of its keys and values. Only calls that have no mask, or may drop it."""
    strided_masks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a value → attention calls that could use a fused GPU kernel if the value were contiguous. The kernel takes only masks with
    contiguous rows. The value is the mask of these calls, or an earlier value whose memory layout the mask inherits."""
    bare_norms: tuple[str, ...] = ()
    """Norms without weights on a CPU. The kernel computes their mean and variance in the input's dtype: inexact if this dtype is low."""
    bare_taps: tuple[str, ...] = ()
    """Convolutions in which some weights meet only the zeros of the convolution's `padding` argument. If the convolution runs low, its
    backward leaves the gradients of these weights uninitialised."""
    summands: Mapping[str, Summands] = field(default_factory=dict)
    """For each linear op: the values that it adds up, each with its factor."""
    repeated: frozenset[str] = frozenset()
    """Values that a loop passes from one iteration to the next, and inputs of a body graph, which may run many times."""
    run_by_steps: tuple[str, ...] = ()
    """Trained recurrent layers that may run many time steps as separate ops. Autograd would add up low weight gradients of all steps."""
    trained: frozenset[str] = frozenset()
    """Values for which the backward pass computes gradients."""
    read_by_many: tuple[str, ...] = ()
    """Values with so many readers that the sum of the gradients from all readers would be inaccurate in the low format."""
    matrix_products: Mapping[str, MatrixProduct] = field(default_factory=dict)
    """Products that fp8 kernels could run, by name; empty unless fp8 was asked for."""
    held: Mapping[str, Held] = field(default_factory=dict)
    """With what precision torch.autocast would hold the values that come from other graphs: the inputs, if this graph is a subgraph, and
    the results of its own subgraphs."""
    needs_bits: frozenset[str] = frozenset()
    """Values whose rounding error would be magnified by ops of the graph around this graph, or of subgraphs inside it."""
    far_constants: tuple[str, ...] = ()
    """Ops with an argument that is a finite constant beyond the low format's range."""
    device: str = "cpu"
    """Type of the device on which the graph runs; "meta" for a graph that was read from an ONNX file."""
    planned_for: Device | None = None
    """The device for which to plan, as a row of the device table; None to plan for the device at hand."""
    timings: Measured | None = None
    """Measured run times from which to compute prices; None to compute them from the device table."""
    magnitudes: Mapping[str, float] = field(default_factory=dict)
    """Largest magnitude of each parameter and buffer; empty unless the low format's range is narrow."""
    offsets: frozenset[str] = frozenset()
    """Weights with an offset, that is, a mean larger than their spread. Only weights that are added to values and tables in which rows are
    looked up are checked. Also buffers of positions that are only added to attention scores."""
    constants: tuple[ConstantRead, ...] = ()
    """For a graph from an ONNX file: each read of a constant by an op. A constant is stored in the format of its readers."""
    calibration: Calibration | None = None
    """Ranges of the model's values on sample batches; None without calibration."""
    keep_high: KeepHigh | None = None
    """Nodes that an accuracy search keeps in fp32; None without a search."""
    agreed: Agreed = NOTHING_AGREED
    """Colours (low or high) that have been decided for the same ops in other graphs of the model."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Nodes whose ops raised an error on low inputs when tried, each with the error message."""
    pad: PadPolicy | None = None
    """The rules for padding; None if nothing may be padded."""
    calls: Mapping[str, Call] = field(default_factory=dict)
    """The recorded call of every op; empty unless padding may happen."""
    pad_refused: Mapping[str, str] = field(default_factory=dict)
    """Nodes whose ops raised an error on padded inputs when tried, each with the error message."""
    pads_off: bool = False
    """Whether to plan no padding, for example because the padded graph failed its check."""
    given: RegionPlan | None = None
    """The region of the user's plan that this graph must follow; None if the passes decide."""
    notes: tuple[str, ...] = ()
    """Notes made while the graph was read. The plan shows them."""

    @property
    def costs(self) -> CostModel:
        """The prices with which this graph is planned.

        If the policy sets `parity`, they are a weighted mean of the prices in training and in inference, so that both get the same plan.
        """
        return self.own_costs if self.policy.parity is None else replace(self.own_costs, training=self.policy.parity)

    @property
    def own_costs(self) -> CostModel:
        """The prices of this graph without `parity`: for a training step if the graph trains, otherwise for a pass without gradients."""
        row = self.planned_for or device_row(self.device)
        return CostModel(row, self.policy.low, self.training, self.policy.keeps_copies, self.timings, self.policy.memory)

    @property
    def apart(self) -> Problem:
        """A copy of this problem that ignores the model's other graphs: it lacks their colours, and has its own prices (no `parity`)."""
        return replace(self, policy=replace(self.policy, parity=None), agreed=NOTHING_AGREED)


@dataclass(frozen=True)
class Painted:
    """The decision on one node so far: its colour (low, high or plain), the reason, the name of the node that caused it, and a detail."""

    colour: Colour
    reason: Reason
    because_of: str = ""
    detail: str = ""


@dataclass
class Decisions:
    """The decisions made so far on one `Problem`. Deciding passes add to them. Applying passes see only the plan that `freeze` returns."""

    paints: dict[str, Painted] = field(default_factory=dict)
    casts: tuple[Cast, ...] = ()
    pads: PadPlan = field(default_factory=PadPlan)
    edits: list[NodeEdit] = field(default_factory=list)
    quantised: QuantisedProducts = field(default_factory=QuantisedProducts)
    notes: list[str] = field(default_factory=list)

    def paint(self, name: str, colour: Colour, reason: Reason, because_of: str = "", detail: str = "") -> None:
        self.paints[name] = Painted(colour, reason, because_of, detail)

    def keep_high(self, problem: Problem, name: str, reason: Reason, because_of: str = "") -> None:
        """Give the op `name` the colour high (fp32), unless an override or `OpNode.pinned` (as for an explicit dtype) has fixed its colour.

        Three kinds of ops do not change: ops that are high already, ops without an fp32 value, and ops whose subgraph decides their colour
        (`Reason.BODY`).
        """
        node, paint = problem.graph[name], self.paints.get(name)
        asked = node.op in problem.lists.asked or (paint is not None and paint.reason in (Reason.ASKED, Reason.BODY))
        if node.carries_fp32 and node.pinned is None and not asked and (paint is None or paint.colour is Colour.LOW):
            self.paint(name, Colour.HIGH, reason, because_of)

    def tie(self, problem: Problem) -> None:
        """Give the nodes of each precision group one colour: high (fp32) if one of them is high, otherwise low if one is low.

        The nodes of a group share memory or a kernel. A group in which no node has a colour yet does not change.
        """
        for members in problem.graph.precision_groups().values():
            painted = [name for name in members if name in self.paints]
            high = next((name for name in painted if self.paints[name].colour is Colour.HIGH), None)
            cause = high or next((name for name in painted if self.paints[name].colour is Colour.LOW), None)
            if cause is None:
                continue
            colour = self.paints[cause].colour
            for name in members:
                if name not in self.paints or self.paints[name].colour is not colour:
                    self.paint(name, colour, Reason.TIED, because_of=cause)

    @property
    def colours(self) -> dict[str, Colour]:
        return {name: painted.colour for name, painted in self.paints.items()}

    def edit(self, problem: Problem, node: str, what: Edit) -> None:
        """Add an edit of the op `node` to the plan: a change that is neither a cast nor a pad. `what` is the kind of the edit.

        The edit is switched off if it is switched off in the user's plan (`problem.given`).
        """
        given = problem.given.edits if problem.given is not None else ()
        off = any(edit.node == node and edit.what is what and not edit.on for edit in given)
        self.edits.append(NodeEdit(node, what, on=not off))

    def edit_low(self, problem: Problem, nodes: Iterable[str], what: Edit) -> None:
        """Add a change of the kind `what` (see `edit`), such as fp32 statistics of a norm, to the plan for each low op in `nodes`."""
        for name in nodes:
            if self.paints[name].colour is Colour.LOW:
                self.edit(problem, name, what)

    def note(self, text: str) -> None:
        """Add `text` to the notes of the plan, unless they hold it already."""
        if text not in self.notes:
            self.notes.append(text)

    def freeze(self, problem: Problem) -> RegionPlan:
        """Return the decisions as the plan of the graph of `problem`. Every node must have a colour (low, high or plain)."""
        return RegionPlan(
            name=problem.name,
            nodes=tuple(self._node_plans(problem)),
            casts=self.casts,
            training=problem.training,
            notes=tuple(dict.fromkeys((*problem.notes, *self.notes))),
            entry=problem.entry,
            pads=self.pads,
            edits=tuple(self.edits),
            scales_loss=problem.scale_loss,
            quantised=self.quantised,
            basis=problem,
        )

    def _node_plans(self, problem: Problem) -> list[NodePlan]:
        low, plans = problem.policy.low.name, []
        for node in problem.graph:
            painted = self.paints[node.name]
            plans.append(
                NodePlan(
                    name=node.name,
                    op=node.op,
                    colour=painted.colour,
                    reason=painted.reason,
                    because_of=painted.because_of,
                    detail=painted.detail,
                    kind=node.kind,
                    dtype=low if painted.colour is Colour.LOW and node.carries_fp32 else node.dtype,
                    shape=node.shape,
                    flops=node.flops,
                    module=node.module,
                    source=node.source,
                    role=node.role,
                    inputs=tuple(operand.value for operand in node.operands),
                )
            )
        return plans
