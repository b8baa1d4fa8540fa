"""The strict interpreter: it runs a captured graph in fp32 and rounds every low result and cast copy to nearest even.

`verify` and `debug` use it. The model first runs unrounded, as the reference. In a rounded run, every result is compared with its value
before rounding and with the reference. With gradients on, the gradient of a low value is also rounded and measured. Before rounding it is
multiplied by the loss scale, because low kernels see scaled gradients. Matrix products that the plan runs in fp8 read fp8 copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate, map_arg

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import is_checkpoint
from amprewrite.graphs.fx.ops.quantised_products import Scaled, quantise, quantised_product
from amprewrite.graphs.fx.ops.wide_products import wide_linear
from amprewrite.graphs.fx.read.calls import bias_of, operands, transposes
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.ir.plans.plan import Cast, NodePlan, RegionPlan
from amprewrite.ir.plans.product_plan import ProductPlan
from amprewrite.runtime.compiler.capture_check import Values, floats, relative_error
from amprewrite.tables.formats import FP32, GEMMS, RECIPES, Format, W, X, is_far, saturate
from amprewrite.tables.vocabulary import Colour, Edit
from amprewrite.torch_internals.trees import tree_map


@dataclass(frozen=True)
class Row:
    """The measured effect of rounding on one tensor: a result, a cast copy of a result, or the gradient of a result."""

    name: str
    """Name of the node, or "node -> format" for a cast copy."""
    op: str
    """Name of the op, or "cast"."""
    colour: Colour
    introduced: float
    """Relative L2 error of this rounding alone, against the unrounded result of the op on the same (rounded) inputs."""
    accumulated: float
    """Relative L2 error after rounding, against the unrounded fp32 run; NaN if the unrounded run has no value of this shape."""
    largest: float
    """Largest finite magnitude before rounding."""
    overflow: float
    """Share of the elements, from 0 to 1, that are finite before rounding and not finite after it."""
    underflow: float
    """Share of the elements, from 0 to 1, that are nonzero before rounding and zero after it."""
    module: str = ""
    """Path of the module that runs the op; "" for the root."""
    source: str = ""
    """Place in the model's code, as file:line; "" if unknown."""
    weight: bool = False
    """Whether the tensor is a cast copy of a parameter, or the gradient of a parameter."""
    inherited: float = math.nan
    """Relative L2 error before rounding, against the unrounded fp32 run: the part that stems from errors of the operands."""
    smallest: float = 0.0
    """Smallest nonzero magnitude before rounding; 0 if all values are zero."""
    inputs: tuple[str, ...] = ()
    """Names (`Row.name`) of the measured tensors that the op reads: results, or cast copies of results."""


# -- round and measure tensors ------------------------------------------------------------
def round_to(tensor: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return a detached fp32 tensor with every value of `tensor` rounded to nearest even in `fmt`."""
    return tensor.detach().to(fmt.dtype).to(torch.float32)


def _round_memory(tensor: torch.Tensor, fmt: Format) -> None:
    """Round `tensor` to `fmt` in place. Elements may share memory, as in an expanded tensor."""
    if torch._debug_has_internal_overlap(tensor) == 0:
        tensor.copy_(round_to(tensor, fmt))
        return
    memory = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    numbers = torch.arange(memory.numel(), device=memory.device)
    places = numbers.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).unique()
    memory[places] = round_to(memory[places], fmt)


def measure(
    name: str,
    op: str,
    colour: Colour,
    got: list[torch.Tensor],
    before: list[torch.Tensor],
    exact: list[torch.Tensor] | None,
    limit: float = math.inf,
) -> Row:
    """Return the `Row` of a result: compare its tensors after rounding (`got`) with those `before` rounding and in the fp32 run (`exact`).

    `colour` is the op's format: low, or high (fp32). `limit` clamps `before` and `exact`; pass it if the plan clamps the value to
    the format's range. The errors against the fp32 run are NaN if `exact` is None or has other shapes.
    """
    if math.isfinite(limit):
        before = [saturate(t, limit) for t in before]
        exact = None if exact is None else [saturate(t, limit) for t in exact]
    count = max(sum(t.numel() for t in before), 1)
    sizes = [torch.where(t.isfinite(), t, 0).abs() for t in before if t.numel()]
    largest = max((t.max().item() for t in sizes), default=0.0)
    smallest = min((t.min().item() for t in (t[t > 0] for t in sizes) if t.numel()), default=0.0)
    overflow = sum(int((t.isfinite() & ~r.isfinite()).sum()) for t, r in zip(before, got, strict=True))
    underflow = sum(int(((t != 0) & (r == 0)).sum()) for t, r in zip(before, got, strict=True))
    accumulated = inherited = math.nan
    if exact is not None and [t.shape for t in exact] == [t.shape for t in got]:
        accumulated, inherited = relative_error(got, exact), relative_error(before, exact)
    introduced = relative_error(got, before)
    return Row(
        name, op, colour, introduced, accumulated, largest, overflow / count, underflow / count, inherited=inherited, smallest=smallest
    )


def is_fp32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.layout == torch.strided


# -- records of a graph and of one run ------------------------------------------------------------
@dataclass
class StrictRegion:
    """A captured fp32 graph, with the plan that decides which values are rounded."""

    captured: Captured
    plan: RegionPlan
    nodes: dict[torch.fx.Node, NodePlan]
    may_saturate: frozenset[str]

    @classmethod
    def of(cls, captured: Captured, plan: RegionPlan) -> StrictRegion:
        """Return the StrictRegion of a graph and its plan. Nodes are matched by position, since both are in the same order."""
        pairs = list(zip(captured.problem.graph, plan.nodes, strict=True))
        nodes = {captured.nodes[vertex.name]: planned for vertex, planned in pairs}
        may_saturate = frozenset(planned.name for vertex, planned in pairs if vertex.may_saturate)
        return cls(captured=captured, plan=plan, nodes=nodes, may_saturate=may_saturate)


@dataclass
class Recording:
    """Options of one run of a graph in the strict interpreter, and the values and rows (errors) that the run records."""

    reference: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Results in the unrounded run, by node name (with the path of its checkpoint body, if any)."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients of results in the unrounded run, by the same names."""
    rounding: bool = False
    """Whether the run rounds by the plan. If not, it records the reference."""
    kept: frozenset[str] = frozenset()
    """Names of nodes that run in fp32 although the plan makes them low. Low ops that read them read a rounded copy."""
    backward: bool = False
    """Whether backward follows the run, so that gradients are recorded."""
    scale: float = 1.0
    """Loss scale by which gradients are multiplied before rounding."""
    values: Values | None = None
    """The values that the eager model computes, with which the results of captured ops are compared; None if nothing is compared."""
    parted: list[NodePlan] = field(default_factory=list)
    """Captured ops whose results are not among the eager model's `values`, in running order."""
    rows: list[Row] = field(default_factory=list)
    """Measured errors of each op result and each cast copy, in running order."""
    gradient_rows: list[Row] = field(default_factory=list)
    """Measured errors of each rounded gradient, in the order of backward."""


class _Rounded(torch.autograd.Function):
    """Autograd op that returns `rounded` in place of `value`. Its backward rounds the gradient and calls `seen(rounded, unrounded)`."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, rounded: torch.Tensor, fmt: Format, scale: float, seen: Callable[..., None]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.fmt, ctx.scale, ctx.seen = fmt, scale, seen
        return rounded.detach()  # if `rounded` itself were returned, autograd would make it a view, which refuses in-place writes

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:  # type: ignore[override]
        if gradient is None:
            return None, None, None, None, None
        rounded = round_to(gradient * ctx.scale, ctx.fmt) / ctx.scale
        ctx.seen(rounded, gradient)
        # the model may differentiate this gradient: then round the second-order gradient, too, but do not measure it
        return _Rounded.apply(gradient, rounded, ctx.fmt, ctx.scale, lambda *_: None), None, None, None, None  # type: ignore[no-untyped-call]


class StrictInterpreter(torch.fx.Interpreter):
    """Runs one captured graph in fp32 and fills `recording`.

    With `recording.rounding`, it rounds by the plan and measures each result against the reference. Otherwise it records the reference.
    `path` is the prefix of names for the body graph of a checkpoint, "" for an outer graph.
    """

    def __init__(self, region: StrictRegion, recording: Recording, path: str = "") -> None:
        super().__init__(region.captured.module, garbage_collect_values=True)
        self.region, self.recording, self.path = region, recording, path
        self.low = region.captured.problem.policy.low
        self.copies: dict[Cast, Any] = {}
        self.fp8 = {each.node: each for each in region.plan.quantised.chosen}
        self.largest = {each.value: each.largest for each in region.plan.quantised.copies if each.role == X}
        self.quantised: dict[str, list[str]] = {}
        """{matrix product with fp8 operands: `Row.name` of each of its fp8 copies}."""
        self.wide = region.plan.edited(Edit.WIDE_PRODUCT)
        self.clamped = region.plan.edited(Edit.CLAMP_CONSTANTS)
        self.casts = {
            (cast.value, user): cast
            for cast in region.plan.casts
            if cast.to != FP32.name
            for user in cast.users
            if recording.rounding and user not in recording.kept
        }

    def run_node(self, n: torch.fx.Node) -> Any:
        planned = self.region.nodes[n]
        if planned.role != "op":
            result = super().run_node(n)
            self._keep(planned, result)
            return result
        args, kwargs = map_arg((n.args, n.kwargs), lambda node: self._operand(planned, node))
        if is_checkpoint(n):
            return self._run_body(n, args[1:])
        if not self.recording.rounding:
            result = getattr(self, n.op)(n.target, args, kwargs)
            self._keep(planned, args[0] if result is None and args else result)
            return result
        low = self._is_low(planned)
        if low and planned.name in self.clamped:
            args, kwargs = map_aggregate((args, kwargs), self._fit)
        fp8 = self.fp8.get(planned.name) if low else None
        result = getattr(self, n.op)(n.target, args, kwargs) if fp8 is None else self._product(n, planned, fp8)
        shown = args[0] if result is None and args else result  # ops such as setitem return None: measure the tensor they write
        before = [t.detach().clone() if low else t.detach() for t in floats(shown)]
        if planned.name in self.wide and planned.name not in self.recording.kept:
            x, w, bias = (node and self._operand(planned, node) for node in (*(operands(n) or ()), bias_of(n)))
            result = shown = wide_linear(x, w, bias, transposes(n))
        if low:
            rounded = tree_map(lambda value: self._round(planned, value, args[:1]), shown)
            result = None if result is None else rounded
            shown = rounded
        if before:
            limit = self.low.max if low and planned.name in self.region.may_saturate else math.inf
            row = self._row(planned, floats(shown), before, limit)
            copies = {value.partition(" -> ")[0]: value for value in self.quantised.get(planned.name, ())}
            read = (copies.get(f"{self.path}{value}") or self._read(planned, value) for value in planned.inputs)
            self.recording.rows.append(replace(row, inputs=tuple(read)))
        return result

    def _product(self, n: torch.fx.Node, planned: NodePlan, plan: ProductPlan) -> Any:
        """Run a matrix product. `plan` says which of its GEMMs (forward, backward) read fp8 copies. Record a row (errors) for each copy."""
        recipe, gemms = self.region.plan.quantised.recipe, tuple(gemm for gemm in GEMMS if plan.takes(gemm))
        read, bias, transposed = operands(n) or (), bias_of(n), transposes(n)
        values = [self._operand(planned, node) for node in read]
        largest = [self.largest.get(self.region.nodes[node].name) if role == X else None for role, node in zip((X, W), read, strict=True)]
        copies = [
            quantise(value, role, recipe, gemms, transposed and role == W, most)
            for role, value, most in zip((X, W), values, largest, strict=True)
        ]
        for role, node, value, copy in zip((X, W), read, values, copies, strict=True):
            found = copy.straight or (copy.turned and Scaled(copy.turned.data.t(), copy.turned.scale.t()))
            if found is not None:
                got = found.values().t() if transposed and role == W else found.values().reshape(value.shape)
                self._note_copy(planned, self.region.nodes[node], RECIPES[recipe].format(role).name, got, value)
        wide = None if bias is None else self._operand(planned, bias)
        return quantised_product(values[0], values[1], wide, copies[0], copies[1], recipe, gemms, transposed)

    def _note_copy(self, reader: NodePlan, planned: NodePlan, to: str, got: torch.Tensor, before: torch.Tensor) -> None:
        row = self._row(planned, [got], [before.detach()], math.inf)
        name = f"{row.name} -> {to}"
        self.quantised.setdefault(reader.name, []).append(name)
        if all(name != other.name for other in self.recording.rows):
            weight = planned.role == "parameter"
            read = (self._read(reader, planned.name),)
            self.recording.rows.append(replace(row, name=name, op="cast", colour=Colour.LOW, weight=weight, inputs=read))

    def _is_low(self, planned: NodePlan) -> bool:
        return planned.colour is Colour.LOW and planned.name not in self.recording.kept

    def _read(self, reader: NodePlan, value: str) -> str:
        """Return the `Row.name` of the tensor that `reader` reads for `value`: "value -> bf16" for a cast copy, otherwise "value"."""
        cast = self.casts.get((value, reader.name))
        return f"{self.path}{value}" + (f" -> {cast.to}" if cast else "")

    def _keep(self, planned: NodePlan, value: Any) -> None:
        if self.recording.rounding:
            return
        if self.recording.values is not None and planned.role == "op" and not self.recording.values.had(value):
            self.recording.parted.append(planned)
        name = self.path + planned.name
        found = floats(value)
        self.recording.reference[name] = [t.detach().clone() for t in found]
        if self.recording.backward and len(found) == 1 and found[0].requires_grad and planned.colour is Colour.LOW:

            @uncaptured
            def keep(gradient: torch.Tensor | None) -> None:
                if gradient is not None:
                    self.recording.gradients[name] = gradient.detach().clone()

            found[0].register_hook(keep)

    def _operand(self, reader: NodePlan, node: torch.fx.Node) -> Any:
        planned = self.region.nodes[node]
        cast = self.casts.get((planned.name, reader.name))
        if cast is not None:
            return self._copy(cast, planned, self.env[node])
        if planned.name in self.recording.kept and self.recording.rounding and self._is_low(reader):
            return self._copy(Cast(planned.name, self.low.name, ()), planned, self.env[node])
        return self.env[node]

    def _copy(self, cast: Cast, planned: NodePlan, value: Any) -> Any:
        """Return the low copy of `value` that `cast` plans. The first call makes and measures the copy; later calls return it again."""
        if cast not in self.copies:
            limit = self.low.max if cast.saturate else math.inf
            self.copies[cast] = tree_map(
                lambda t: self._low_value(planned, t, saturate(t, limit) if cast.saturate else t) if is_fp32(t) else t, value
            )
            row = self._row(planned, floats(self.copies[cast]), [t.detach() for t in floats(value)], limit)
            name = f"{row.name} -> {cast.to}"
            self.recording.rows.append(replace(row, name=name, op="cast", colour=Colour.LOW, weight=cast.weight, inputs=(row.name,)))
        return self.copies[cast]

    def _low_value(self, planned: NodePlan, value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Round `source` to the low format and return it. `source` is `value`, or `value` clamped to the range of the format.

        If `value` requires a gradient, backward also rounds this gradient, and measures the rounding if `recording.backward` is True.
        """
        rounded = round_to(source, self.low)
        if not (value.requires_grad and torch.is_grad_enabled()):
            return rounded

        def seen(got: torch.Tensor, before: torch.Tensor) -> None:
            if not self.recording.backward:  # without `backward`, the gradients come from the model's own forward: do not measure them
                return
            name = self.path + planned.name
            exact = self.recording.gradients.get(name) if planned.role == "op" else None
            scale = self.recording.scale
            row = measure(name, planned.op, planned.colour, [got * scale], [before * scale], None if exact is None else [exact * scale])
            self.recording.gradient_rows.append(
                replace(row, module=planned.module, source=planned.source, weight=planned.role == "parameter")
            )

        found: torch.Tensor = _Rounded.apply(source, rounded, self.low, self.recording.scale, seen)  # type: ignore[no-untyped-call]
        return found

    def _row(self, planned: NodePlan, got: list[torch.Tensor], before: list[torch.Tensor], limit: float) -> Row:
        name = self.path + planned.name
        colour = planned.colour if planned.name not in self.recording.kept else Colour.HIGH
        row = measure(name, planned.op, colour, got, before, self.recording.reference.get(name), limit)
        return replace(row, module=planned.module, source=planned.source)

    def _round(self, planned: NodePlan, value: Any, first: tuple[Any, ...]) -> Any:
        """Round an fp32 result to the low format and return it. Return any other value unchanged.

        `first` holds the first operand of the op. If `value` is this operand, because the op works in place, round it in place. If rounding
        changes no element, return the same tensor, so that a view stays a view.
        """
        if not is_fp32(value):
            return value
        rounded = round_to(value, self.low)
        if any(value is operand for operand in first):
            _round_memory(value.data, self.low)  # write to `.data`, because autograd would refuse a backward that needs the old values
            return value
        return value if torch.equal(rounded, value.detach()) else self._low_value(planned, value, value)

    def _fit(self, leaf: Any) -> Any:
        """Return ±max of the low format for a number beyond its range, as the rewritten graph does. Return any other `leaf` unchanged."""
        return math.copysign(self.low.max, leaf) if is_far(leaf, self.low) else leaf

    def _run_body(self, n: torch.fx.Node, args: tuple[Any, ...]) -> Any:
        """Run the body graph of an activation checkpoint, rounded by the plan of the body. Without such a plan, do not round or record."""
        name = str(n.args[0].target)  # type: ignore[union-attr]
        plan = next((body for body in self.region.plan.bodies if body.name == name), None)
        if plan is None:
            return torch.fx.Interpreter(getattr(self.module, name)).run(*args)
        body = StrictRegion.of(self.region.captured.parts[n], plan)
        return StrictInterpreter(body, self.recording, f"{self.path}{name}/").run(*args)
