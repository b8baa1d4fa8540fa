"""The strict interpreter: what a plan does to a model's numbers, op by op, whatever the kernels of this machine do.

CPU kernels hide low precision (they may compute fp16 in fp32 throughout), so a claim about a plan is checked here: every op runs
in fp32, and its result is rounded to nearest even where the plan says low and where a cast to low stands.

1. Capture the plain twin again, as the rewritten model is captured, and decide each region's plan anew: at run time nothing
   is kept for this.
2. Run it unrounded and keep every result.
3. Run it again rounded. Each op's result before rounding gives the error that the op itself introduces; the kept result gives
   the error accumulated so far.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.fx
from torch import nn
from torch.fx.node import map_aggregate, map_arg
from torch.utils._pytree import tree_leaves, tree_map

from amprewrite.colour import Colour
from amprewrite.dynamo import compile_afresh, parameter_names, refuse_ambient_autocast
from amprewrite.errors import AmpRewriteError, CaptureError, PolicyError
from amprewrite.formats import FP32, Format
from amprewrite.frontends.fx_reader import turns_grad_on
from amprewrite.given_plan import match_region
from amprewrite.granularity import part_paths
from amprewrite.plan import Cast, NodePlan, RegionPlan
from amprewrite.policy import Policy
from amprewrite.program import Program
from amprewrite.rewrite_graph import BODIES, _device, read_program, rewrite_graph
from amprewrite.rewritten import Rewritten, plain_of, session_of

Measure = Literal["accumulated", "introduced", "overflow", "underflow", "largest"]
WIDTH = 100
"""Columns that a printed report takes at most."""


@dataclass(frozen=True)
class Row:
    """What rounding did to one result, or to one cast copy of it."""

    name: str
    op: str
    """Name of the op, or "cast"."""
    colour: Colour
    introduced: float
    """Relative L2 error of the rounding alone: against the same op in fp32 on the same rounded inputs."""
    accumulated: float
    """Relative L2 error against the fp32 model."""
    largest: float
    """Largest finite magnitude before rounding."""
    overflow: float
    """Share of values that were finite and are not after rounding."""
    underflow: float
    """Share of values that were not zero and are after rounding."""
    module: str = ""
    source: str = ""
    weight: bool = False
    """A cast of a parameter."""


@dataclass(frozen=True)
class Report:
    """The errors of a rewritten model on one set of inputs. `print(report)` shows the worst nodes first."""

    low: str
    rows: tuple[Row, ...]
    """In the order in which they ran."""
    output_error: float
    """Relative L2 error of the model's floating outputs together, against fp32."""
    notes: tuple[str, ...] = ()

    @property
    def overflows(self) -> tuple[Row, ...]:
        """Where values left the range of the low format, in the order in which they ran: the first is the cause."""
        return tuple(row for row in self.rows if row.overflow > 0)

    def worst(self, n: int = 10, by: Measure = "accumulated") -> tuple[Row, ...]:
        """The `n` worst rows: those that overflow as they ran, then the others by the measure asked for."""

        def badness(row: Row) -> float:
            value: float = getattr(row, by)
            return -1.0 if math.isnan(value) else value

        others = sorted((row for row in self.rows if not row.overflow), key=badness, reverse=True)
        return (*self.overflows, *others)[:n]

    def table(self, n: int = 20, by: Measure = "accumulated") -> str:
        """The `n` worst rows as text, at most 100 columns wide; low ops that only hand values on are left out."""
        numbers = ("colour", "introduced", "accumulated", "largest", "overflow", "underflow")
        widths = (6, 10, 11, 9, 8, 9)
        left = WIDTH - sum(widths) - len(widths)
        lines = [f"{'node':{left}}" + "".join(f" {title:>{width}}" for title, width in zip(numbers, widths, strict=True))]
        shown = [row for row in self.worst(len(self.rows), by) if row.colour is Colour.HIGH or row.introduced or row.overflow]
        for row in shown[:n]:
            values = (
                row.colour.value, f"{row.introduced:.2e}", f"{row.accumulated:.2e}", f"{row.largest:.2e}",
                _share(row.overflow), _share(row.underflow),
            )  # fmt: skip
            lines.append(_place(row, left) + "".join(f" {text:>{width}}" for text, width in zip(values, widths, strict=True)))
        if len(shown) > n:
            lines.append(f"and {len(shown) - n} more")
        return "\n".join(lines)

    def __str__(self) -> str:
        bad = self.overflows
        lines = [f"strict run in {self.low}: output error {self.output_error:.2e} over {len(self.rows)} results and cast copies"]
        if bad:
            lines.append(f"overflow: {bad[0].name} is the first of {len(bad)}; it reaches {bad[0].largest:.3g}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, "", self.table()])


def verify(amp: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Report:
    """What the plan of the rewritten model `amp` does to its numbers on these inputs, with true rounding.

    The model is captured anew in its present mode (train or eval, with or without gradients); buffers, random state and
    the inputs are left as they were. All results of one fp32 run are held in memory meanwhile.

    Raises PolicyError where `amp` is not rewritten, CaptureError where nothing of it can be captured.
    """
    if not isinstance(amp, Rewritten):
        raise PolicyError(f"verify takes a rewritten model, not {type(amp).__name__}; pass what amprewrite.rewrite returned")
    if not isinstance(args, tuple):
        raise PolicyError(f"verify takes the arguments as a tuple, not {type(args).__name__}; write verify(amp, (x,))")
    refuse_ambient_autocast()
    recorder = _Recorder(amp)
    model = plain_of(amp)
    for path in part_paths(model, recorder.session.options.granularity) or ("",):
        part = model.get_submodule(path)
        forward = part.forward
        part.__dict__["forward"] = compile_afresh(forward, recorder.capture_in(path, parameter_names(forward)), whole=False, root=part)
    reference = [t.detach().clone() for t in _output_floats(_run(model, args, kwargs))]
    if not recorder.runs:
        name = type(model).__name__
        raise CaptureError(f"nothing of {name} can be captured, so there is no plan to verify; call it and see amp.plan.skipped")
    recorder.rounded = True
    outputs = _output_floats(_run(model, args, kwargs))
    if recorder.diverged:
        recorder.notes.append("rounding sent the model's control flow another way: later results have no fp32 counterpart")
    comparable = [t.shape for t in reference] == [t.shape for t in outputs]
    error = relative_error(outputs, reference) if comparable else math.inf
    return Report(recorder.low, tuple(recorder.rows), error, tuple(recorder.notes))


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
    """Call the model on copies of the inputs; buffers and random state stay as they were."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    copied = tree_map(_copied, (args, dict(kwargs or {})))
    try:
        with torch.random.fork_rng(devices=devices):
            return model(*copied[0], **copied[1])
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, AmpRewriteError):
            raise error.inner_exception from None
        raise
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and not buffer.is_inference() and not torch.equal(buffer, buffers[name]):
                    buffer.copy_(buffers[name])


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf)
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


# -- numbers ------------------------------------------------------------------------------
def round_to(tensor: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`tensor` with every value rounded to nearest even in `fmt`, in fp32 storage."""
    return tensor.detach().to(fmt.dtype).to(torch.float32)


def relative_error(got: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Relative L2 error over several tensors together. Infinities may be equal; any other non-finite difference is inf."""
    difference = size = 0.0
    for a, b in zip(got, exact, strict=True):
        a, b = a.detach().double(), b.detach().double()
        same = (a == b) | (a.isnan() & b.isnan())
        difference += torch.where(same, 0, a - b).square().sum().item()
        size += torch.where(b.isfinite(), b, 0).square().sum().item()
    if difference == 0:
        return 0.0
    return math.sqrt(difference / size) if size and math.isfinite(difference) else math.inf


def _measure(
    name: str,
    op: str,
    colour: Colour,
    got: list[torch.Tensor],
    before: list[torch.Tensor],
    exact: list[torch.Tensor] | None,
    limit: float,
) -> Row:
    """Compare a result with what it was before rounding and with the fp32 run; `limit` clamps both where the plan saturates."""
    if math.isfinite(limit):
        before = [t.clamp(-limit, limit) for t in before]
        exact = None if exact is None else [t.clamp(-limit, limit) for t in exact]
    count = max(sum(t.numel() for t in before), 1)
    largest = max((torch.where(t.isfinite(), t, 0).abs().max().item() for t in before if t.numel()), default=0.0)
    overflow = sum(int((t.isfinite() & ~r.isfinite()).sum()) for t, r in zip(before, got, strict=True))
    underflow = sum(int(((t != 0) & (r == 0)).sum()) for t, r in zip(before, got, strict=True))
    same_shape = exact is not None and [t.shape for t in exact] == [t.shape for t in got]
    accumulated = relative_error(got, exact) if same_shape and exact is not None else math.nan
    return Row(name, op, colour, relative_error(got, before), accumulated, largest, overflow / count, underflow / count)


# -- capture ------------------------------------------------------------------------------
@dataclass
class _Region:
    """A captured fp32 graph with its plan."""

    module: torch.fx.GraphModule
    plan: RegionPlan
    nodes: dict[torch.fx.Node, NodePlan]
    huge: frozenset[str]
    policy: Policy

    @classmethod
    def of(cls, program: Program, plan: RegionPlan) -> _Region:
        """Nodes are matched by their place: the reader's order is canonical, names may differ in the body of a checkpoint."""
        assert program.module is not None
        pairs = list(zip(program.graph, plan.nodes, strict=True))
        nodes = {program.fx_nodes[vertex.name]: planned for vertex, planned in pairs}
        return cls(
            program.module, plan, nodes, frozenset(planned.name for vertex, planned in pairs if vertex.huge), program.policy
        )


class _Recorder:
    """Backend of the capture, and what the two runs collect."""

    def __init__(self, amp: Rewritten) -> None:
        self.session = session_of(amp)
        self.low = FP32.name
        self.regions = 0
        self.rounded = False
        self.runs: list[tuple[int, dict[str, list[torch.Tensor]]]] = []
        self.place = 0
        self.diverged = False
        self.rows: list[Row] = []
        self.notes: list[str] = []

    def capture_in(self, path: str, names: tuple[str, ...]) -> Callable[..., Any]:
        """Dynamo's backend for the part at `path`, whose positional parameters are `names`."""
        return lambda module, example_inputs: self._capture(module, path, names)

    def _capture(self, module: torch.fx.GraphModule, path: str, names: tuple[str, ...]) -> Callable[..., Any]:
        policy = self.session.policy_for(_device(module))
        self.low = policy.low.name
        grad = torch.is_grad_enabled() or turns_grad_on(module.graph)
        program = read_program(module, policy, f"graph{self.regions}", path, grad, names)
        if self.session.options.given is not None:
            program.match_given = self._given
            program.given = self._given(program)
        _, plan = rewrite_graph(program)
        region, number = _Region.of(program, plan), self.regions
        self.regions += 1

        def run(*inputs: Any) -> Any:
            with torch.no_grad():
                return self.run(number, region, inputs)

        return run

    def _given(self, program: Program) -> RegionPlan:
        assert self.session.options.given is not None
        return match_region(self.session.options.given, program)

    def run(self, number: int, region: _Region, inputs: tuple[Any, ...]) -> Any:
        if not self.rounded:
            self.runs.append((number, {}))
            return _Interpreter(region, self.runs[-1][1], rounding=False).run(*inputs)
        self.diverged = self.diverged or self.place >= len(self.runs) or self.runs[self.place][0] != number
        interpreter = _Interpreter(region, {} if self.diverged else self.runs[self.place][1])
        self.place += 1
        result = interpreter.run(*inputs)
        prefix = f"{region.plan.name}/" if self.regions > 1 else ""
        self.rows += [replace(row, name=prefix + row.name) for row in interpreter.rows]
        return result


# -- interpretation -------------------------------------------------------------------------
class _Interpreter(torch.fx.Interpreter):
    """Runs a captured fp32 graph.

    Rounding, it does as the plan says and measures against `reference`; else it fills `reference` with every result.
    """

    def __init__(self, region: _Region, reference: dict[str, list[torch.Tensor]], path: str = "", rounding: bool = True) -> None:
        super().__init__(region.module, garbage_collect_values=True)
        self.region, self.reference, self.path, self.rounding = region, reference, path, rounding
        self.low = region.policy.low
        self.rows: list[Row] = []
        self.copies: dict[Cast, Any] = {}
        self.planned = {planned.name: planned for planned in region.plan.nodes}
        self.casts = {
            (cast.value, user): cast for cast in region.plan.casts if cast.to != FP32.name for user in cast.users if rounding
        }

    def run_node(self, n: torch.fx.Node) -> Any:
        planned = self.region.nodes[n]
        if planned.role != "op":
            result = super().run_node(n)
            self._keep(planned, result)
            return result
        args, kwargs = map_arg((n.args, n.kwargs), lambda node: self._operand(planned, node))
        if getattr(n.target, "__name__", "") in BODIES:
            return self._run_body(n, args[1:])
        if not self.rounding:
            result = getattr(self, n.op)(n.target, args, kwargs)
            self._keep(planned, args[0] if result is None and args else result)
            return result
        low = planned.colour is Colour.LOW
        if low:
            args, kwargs = map_aggregate((args, kwargs), self._fit)
        result = getattr(self, n.op)(n.target, args, kwargs)
        shown = args[0] if result is None and args else result  # setitem and the like stand for what they write
        before = [t.detach().clone() if low else t.detach() for t in _floats(shown)]
        if low:
            rounded = tree_map(lambda value: self._round(value, args[:1]), shown)
            result = None if result is None else rounded
            shown = rounded
        if before:
            limit = self.low.max if low and planned.name in self.region.huge else math.inf
            self.rows.append(self._row(planned, _floats(shown), before, limit))
        return result

    def _keep(self, planned: NodePlan, value: Any) -> None:
        if not self.rounding:
            self.reference[self.path + planned.name] = [t.detach().clone() for t in _floats(value)]

    def _operand(self, reader: NodePlan, node: torch.fx.Node) -> Any:
        planned = self.region.nodes[node]
        cast = self.casts.get((planned.name, reader.name))
        return self.env[node] if cast is None else self._copy(cast, planned, self.env[node])

    def _copy(self, cast: Cast, planned: NodePlan, value: Any) -> Any:
        """The low copy of a value, made when its first reader wants it and shared by all."""
        if cast not in self.copies:
            limit = self.low.max if cast.saturate else math.inf
            self.copies[cast] = tree_map(
                lambda t: round_to(t.clamp(-limit, limit) if cast.saturate else t, self.low) if _is_fp32(t) else t, value
            )
            row = self._row(planned, _floats(self.copies[cast]), [t.detach() for t in _floats(value)], limit)
            self.rows.append(replace(row, name=f"{row.name} -> {cast.to}", op="cast", colour=Colour.LOW, weight=cast.weight))
        return self.copies[cast]

    def _row(self, planned: NodePlan, got: list[torch.Tensor], before: list[torch.Tensor], limit: float) -> Row:
        name = self.path + planned.name
        row = _measure(name, planned.op, planned.colour, got, before, self.reference.get(name), limit)
        return replace(row, module=planned.module, source=planned.source)

    def _round(self, value: Any, first: tuple[Any, ...]) -> Any:
        """A rounded fp32 tensor. What an op wrote in place is rounded in place; where nothing changes the very tensor is kept,
        for it may be a view of another."""
        if not _is_fp32(value):
            return value
        rounded = round_to(value, self.low)
        if any(value is operand for operand in first):
            value.detach().copy_(rounded)
            return value
        return value if torch.equal(rounded, value.detach()) else rounded

    def _fit(self, leaf: Any) -> Any:
        """Constants beyond the low format's range become its ends, as the rewrite makes them."""
        outside = isinstance(leaf, float) and math.isfinite(leaf) and abs(leaf) > self.low.max
        return math.copysign(self.low.max, leaf) if outside else leaf

    def _run_body(self, n: torch.fx.Node, args: tuple[Any, ...]) -> Any:
        """The body of a rewritten activation checkpoint, by its own plan."""
        name = str(n.args[0].target)  # type: ignore[union-attr]
        module = getattr(self.module, name)
        plan = next((body for body in self.region.plan.bodies if body.name == name), None)
        if plan is None:
            return torch.fx.Interpreter(module).run(*args)
        program = read_program(module, self.region.policy, name, "", plan.training)
        inner = _Interpreter(_Region.of(program, plan), self.reference, f"{self.path}{name}/", self.rounding)
        result = inner.run(*args)
        self.rows += inner.rows
        return result


def _is_fp32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.layout == torch.strided


def _floats(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.layout == torch.strided]


def _output_floats(value: Any) -> list[torch.Tensor]:
    """Floating tensors of a model's result, in objects that pytree does not know too."""

    def inside(part: Any, depth: int) -> Iterator[torch.Tensor]:
        for leaf in tree_leaves(part):
            if isinstance(leaf, torch.Tensor):
                yield from _floats(leaf)
            elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module) and depth < 4:
                yield from inside(vars(leaf), depth + 1)

    return list(inside(value, 0))


# -- text -----------------------------------------------------------------------------------
def _share(share: float) -> str:
    return f"{100 * share:.3g} %" if share else "-"


def _place(row: Row, width: int) -> str:
    """Name and module in `width` columns; a long module path loses its front."""
    name = row.name if len(row.name) <= width else "…" + row.name[1 - width :]
    room = width - len(name) - len(" in ")
    if not row.module or room < 6:
        return f"{name:{width}}"
    module = row.module if len(row.module) <= room else "…" + row.module[1 - room :]
    return f"{name} in {module}".ljust(width)


__all__ = ["Report", "Row", "relative_error", "round_to", "verify"]
