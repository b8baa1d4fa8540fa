"""The plan that users hold: it prints, counts, explains and draws itself.

What prints is imported when it is asked: naming the class alone imports none of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from amprewrite.ir.plans.pad_plan import pad_summary
from amprewrite.ir.plans.plan import ModelPlan, Skipped, region_lines
from amprewrite.report.counts import fp8_counts
from amprewrite.report.schema import schema
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.errors import PlanError
from amprewrite.tables.vocabulary import Colour, Reason


@dataclass(frozen=True)
class CastPlan(ModelPlan):
    """The plan of a model: one region a captured graph.

    `print(plan)` lists every node; `summary()` counts; `explain(name)` answers about a node or a module; `to_json()` and
    `from_json()` round-trip exactly; `edit()` changes colours; `diff(other)` lists what differs.
    """

    @classmethod
    def of(cls, plan: ModelPlan) -> Self:
        """A CastPlan with the content of `plan`."""
        return cls(**{each.name: getattr(plan, each.name) for each in fields(ModelPlan)})

    def explain(self, name: str = "") -> str:
        """Sentences about a node ("linear_3"), a module ("encoder.layer.0") or, with no name, the whole plan.

        What runs in what, which rule decided, caused by whom, what would change it, and what that would cost in casts. What
        would change a node is tried out on the op graph, so only a plan that was just decided can tell; one read from JSON
        gives what it recorded. Heavy ops left high come first. PlanError with near misses for an unknown name.
        """
        from amprewrite.report.questions.explain import explain

        return explain(self, name)

    def summary(self) -> str:
        """Heavy ops left high, counts, and what the plan and the plans it was weighed against would take."""
        return "\n".join([self.counts(), *map(printable, (*self._weighed(), *pad_summary([region.pads for region in self.regions])))])

    def _weighed(self) -> list[str]:
        regions = [region for region in self.regions if region.candidates]
        if not regions:
            return []
        seconds: Counter[str] = Counter()
        casts: Counter[str] = Counter()
        for region in regions:
            for candidate in region.candidates:
                seconds[candidate.name] += candidate.seconds  # type: ignore[assignment]
                casts[candidate.name] += candidate.casts
        own, *others = seconds
        lines = [f"one pass on {regions[0].priced_on}: {1e6 * seconds[own]:.4g} µs, {casts[own]} casts; weighed against"]
        width = max(map(len, others), default=0)
        for name in others:
            more = 100 * (seconds[name] / max(seconds[own], 1e-30) - 1)
            lines.append(f"  {name:{width}}  {1e6 * seconds[name]:.4g} µs ({more:+.1f} %), {casts[name]} casts")
        return lines

    def counts(self) -> str:
        """Counts on a few lines: heavy ops left high first, nodes by colour, casts by kind, share of FLOPs that run low, ops of
        other libraries that no list has."""
        from amprewrite.report.questions.explain import heavy

        ops = [node for node in self.nodes if node.role == "op"]
        colours = Counter(node.colour for node in ops)
        flops = sum(node.flops for node in ops)
        low = sum(node.flops for node in ops if node.colour is Colour.LOW)
        weights = sum(cast.weight for cast in self.casts)
        half = sum(node.flops for node in ops if node.reason is Reason.HALF)
        share = f"{100 * low / flops:.1f} % of matmul and convolution FLOPs" if flops else "no matmul or convolution"
        share += f"; {100 * half / flops:.1f} % are in half precision already" if half else ""
        lines = heavy(self)
        lines += [
            f"{len(ops)} ops in {len(self.regions)} graph{'s' * (len(self.regions) != 1)}: {colours[Colour.LOW]} low ({self.low}), "
            f"{colours[Colour.HIGH]} high (fp32), {colours[Colour.PLAIN]} without fp32 values",
            f"{len(self.casts)} casts: {weights} of weights, {len(self.casts) - weights} of activations; low does {share}",
        ]
        lines += fp8_counts(self)
        foreign = Counter(node.op for node in ops if node.reason is Reason.UNLISTED and "::" in node.op)
        lines += [f"{op} ({count} x) is on no list: it runs in fp32, and its FLOPs are not counted" for op, count in foreign.items()]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"left out: {part}" for part in self.skipped]
        return "\n".join(map(printable, lines))

    def listing(self, fold: bool = False, width: int = 0) -> str:
        """The code that the plan makes, a line an op: dtype, colour, shape, source line and reason, grouped by module.

        `fold=True` gives a table with a row a module that fits one screen instead. Lines are cut at `width`; 0 cuts nothing.
        """
        from amprewrite.report.listing import listing

        return listing(self, fold, width)

    def to_html(self, path: Any, title: str = "", report: Any = None) -> Path:
        """Write a report as one self-contained HTML file: the graph, charts, and an answer for every node.

        `report` is what `verify` or `debug` gave for the same model: it adds ranges and errors. EmitError if `path` cannot
        be written.
        """
        from amprewrite.report.html.page import to_html

        return to_html(self, path, title, report)

    def to_svg(self, path: Any = None, depth: int | None = None) -> str:
        """The graph as SVG text, written to `path` if there is one; modules below `depth` are drawn as one box."""
        from amprewrite.report.pictures.svg import to_svg

        return to_svg(self, path, depth)

    def to_png(self, path: Any, depth: int | None = None, scale: float = 2.0) -> Path:
        """Draw the plan as `to_svg` does, into a PNG file. EmitError if the png extra is not installed."""
        from amprewrite.report.pictures.svg import to_png

        return to_png(self, path, depth, scale)

    def to_dot(self, path: Any = None) -> str:
        """The graph as DOT text for Graphviz, modules as clusters; written to `path` if there is one."""
        from amprewrite.report.pictures.dot import to_dot

        return to_dot(self, path)

    def to_model_explorer(self, path: Any, graph: str = "main") -> Path:
        """Write node data for Google's Model Explorer: colours and casts over the graph called `graph` there."""
        from amprewrite.report.pictures.model_explorer import to_model_explorer

        return to_model_explorer(self, path, graph)

    def _repr_html_(self) -> str:
        """The plan as a notebook shows it: an HTML fragment."""
        from amprewrite.report.html.notebook import to_notebook

        return to_notebook(self, self.summary())

    def __str__(self) -> str:
        lines = [f"cast plan, low = {self.low}, lists = {self.lists}"]
        for region in self.regions:
            lines += ["", *region_lines(region)]
        return "\n".join([*map(printable, lines), "", self.counts()])

    @staticmethod
    def schema() -> dict[str, dict[str, str]]:
        """What each key of the JSON form means, by kind of object: plan, region, node, cast, skipped.

        The version is one number: it rises whenever a file of before cannot be read any more. Keys that are added have defaults.
        """
        return schema()


class PendingPlan:
    """What `amp.plan` is before capture: nothing has been left out yet, and asking it for anything else is a PlanError."""

    skipped: tuple[Skipped, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise PlanError(_PENDING)

    def __str__(self) -> str:
        raise PlanError(_PENDING)


_PENDING = (
    "there is no plan before capture: call the model once, or pass example_inputs to rewrite "
    "(amprewrite.plan(model, args) makes a plan without keeping a rewritten model)"
)
