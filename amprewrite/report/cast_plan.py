"""`CastPlan`, the plan class for users. Its methods print, count, explain and draw the plan.

Each method imports the module that it needs when it is called, so that importing the class stays cheap.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from amprewrite.ir.plans.pad_plan import PadCopy, PaddedValue, PadPlan, PadRegion, pad_summary
from amprewrite.ir.plans.plan import Candidate, Cast, ModelPlan, NodeEdit, NodePlan, RegionPlan, Skipped, region_lines
from amprewrite.ir.plans.product_plan import GemmPlan, ProductPlan, QuantisedCopy, QuantisedProducts
from amprewrite.report.counts import fp8_counts
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.errors import PlanError
from amprewrite.tables.extras import EXTRAS, load_extra
from amprewrite.tables.vocabulary import Colour, Reason


@dataclass(frozen=True)
class CastPlan(ModelPlan):
    """The plan of a model: the format of every node, and all casts. Each captured graph and subgraph has one region (`RegionPlan`).

    The colour of a node is low (bf16 or fp16), high (fp32) or plain (no fp32 value). `print(plan)` lists every node. `summary()` counts
    nodes and casts. `explain(name)` explains a node or a module. `edit()` returns a copy with other colours. `diff(other)` lists
    differences. `to_json()` and `from_json()` round-trip exactly.
    """

    @classmethod
    def of(cls, plan: ModelPlan) -> Self:
        """Return a CastPlan with the content of `plan`."""
        return cls(**{each.name: getattr(plan, each.name) for each in fields(ModelPlan)})

    def explain(self, name: str = "") -> str:
        """Explain a node ("linear_3"), a module ("encoder.layer.0") or, without a name, the whole plan.

        For each node, the sentences give its format, the rule that decided the format, and the node that caused the decision. They also
        give a change that would alter the format, and its price. To find the change, the op graph is planned anew. For a module of more
        than four nodes, and for a saved or edited plan, only recorded reasons are given. In large modules and whole plans, heavy ops
        (matmuls and convolutions) in fp32 come first.

        Raises PlanError for an unknown name; the message lists similar names.
        """
        from amprewrite.report.questions.explain import explain

        return explain(self, name)

    def summary(self) -> str:
        """Return a text: `counts()`, predicted times of this plan and of the alternatives considered, and the padding of this plan."""
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
        """Return a few lines of text with numbers of ops and casts.

        The lines list matmuls and convolutions in fp32. They count ops by colour, casts of weights and of activations, and custom ops that
        are on no op list. They give the share of FLOPs in the low format. Notes and uncaptured parts of the model are last.
        """
        from amprewrite.report.questions.explain import heavy

        ops = [node for node in self.nodes if node.role == "op"]
        colours = Counter(node.colour for node in ops)
        flops = sum(node.flops for node in ops)
        low = sum(node.flops for node in ops if node.colour is Colour.LOW)
        weights = sum(cast.weight for cast in self.casts)
        half = sum(node.flops for node in ops if node.reason is Reason.HALF)
        share = f"{100 * low / flops:.1f} % of matmul and convolution FLOPs" if flops else "no matmul or convolution"
        share += f"; {100 * half / flops:.1f} % are in half precision already" if half else ""
        casts = f"{len(self.casts)} casts: {weights} of weights, {len(self.casts) - weights} of activations"
        if self.casts_follow:
            casts = "casts follow from the colours when the plan is applied"
        lines = heavy(self)
        lines += [
            f"{len(ops)} ops in {len(self.regions)} graph{'s' * (len(self.regions) != 1)}: {colours[Colour.LOW]} low ({self.low}), "
            f"{colours[Colour.HIGH]} high (fp32), {colours[Colour.PLAIN]} without fp32 values",
            f"{casts}; low does {share}",
        ]
        lines += fp8_counts(self)
        foreign = Counter(node.op for node in ops if node.reason is Reason.UNLISTED and "::" in node.op)
        lines += [f"{op} ({count} x) is on no list: it runs in fp32, and its FLOPs are not counted" for op, count in foreign.items()]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"left out: {part}" for part in self.skipped]
        return "\n".join(map(printable, lines))

    def listing(self, fold: bool = False, width: int = 0) -> str:
        """Return the planned graph as code: one op per line, with dtype, colour, shape, source line and reason, grouped by module.

        `fold=True` returns a table with one module per row, which fits one screen. Lines are cut to `width` characters; 0 means no limit.
        """
        from amprewrite.report.counts import listing

        return listing(self, fold, width)

    def to_html(self, path: Any, title: str = "", report: Any = None) -> Path:
        """Write a report as one self-contained HTML file, and return its path.

        The report shows the graph, charts, and for every node the reason for its format and a change that would alter it. `title` is its
        heading; "" for "Cast plan". `report`, a result of `verify` or `debug` for the same model, adds ranges and errors. Raises EmitError
        if `path` cannot be written.
        """
        return load_extra("drawings", "to_html").to_html(self, path, title, report)

    def to_svg(self, path: Any = None, depth: int | None = None) -> str:
        """Return a drawing of the graph as SVG text, and write it to `path` if given.

        A module nested deeper than `depth` is drawn as a closed box; None chooses a depth. Raises EmitError if `path` cannot be written.
        """
        return load_extra("drawings", "to_svg").to_svg(self, path, depth)

    def to_png(self, path: Any, depth: int | None = None, scale: float = 2.0) -> Path:
        """Write the drawing of `to_svg` as a PNG file with `scale` pixels per unit, and return its path.

        `depth` is as for `to_svg`. Raises EmitError if the png extra is not installed, or if `path` cannot be written.
        """
        return load_extra("drawings", "to_png").to_png(self, path, depth, scale)

    def to_dot(self, path: Any = None) -> str:
        """Return the graph as DOT text for Graphviz, with modules as clusters, and write it to `path` if given.

        Raises EmitError if `path` cannot be written.
        """
        return load_extra("drawings", "to_dot").to_dot(self, path)

    def to_model_explorer(self, path: Any, graph: str = "main") -> Path:
        """Write node data for Google's Model Explorer, and return the path. Model Explorer shows the formats in its graph called `graph`.

        Raises EmitError if `path` cannot be written.
        """
        return load_extra("drawings", "to_model_explorer").to_model_explorer(self, path, graph)

    def _repr_html_(self) -> str | None:
        """Return an HTML fragment for notebooks. Return None if the extra "drawings" is not installed, so that notebooks display text."""
        return load_extra("drawings", "HTML").to_notebook(self, self.summary()) if "drawings" in EXTRAS else None

    def __str__(self) -> str:
        lines = [f"cast plan, low = {self.low}, lists = {self.lists}"]
        for region in self.regions:
            lines += ["", *region_lines(region, self.casts_follow)]
        return "\n".join([*map(printable, lines), "", self.counts()])

    @staticmethod
    def schema() -> dict[str, dict[str, str]]:
        """Return {kind of object: {key: meaning}} for the JSON form of a plan. Kinds are plan, region, node, cast, skipped and so on.

        The key `version` of a plan is a number that rises when older files need a migration to be read. A new key alone does not raise it,
        because a file without the key gets the key's default.
        """
        return {kind: _meanings(cls) for kind, cls in KINDS.items()}


class PendingPlan:
    """The value of `amp.plan` until the model is captured. `skipped` is empty; any other attribute raises PlanError."""

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


NOT_WRITTEN = ("basis",)
"""Fields of the classes in KINDS that are not written to JSON."""
KINDS = {
    "plan": ModelPlan,
    "region": RegionPlan,
    "node": NodePlan,
    "cast": Cast,
    "candidate": Candidate,
    "quantised": QuantisedProducts,
    "product": ProductPlan,
    "gemm": GemmPlan,
    "fp8 copy": QuantisedCopy,
    "pads": PadPlan,
    "pad region": PadRegion,
    "padded value": PaddedValue,
    "pad copy": PadCopy,
    "edit": NodeEdit,
    "skipped": Skipped,
}
"""The class of each kind of object in a plan's JSON form. Keys of an object are fields of the class; their docstrings give the meaning."""


def _meanings(cls: type) -> dict[str, str]:
    """Return {field: its docstring} for a dataclass. Python keeps no docstrings of fields, so the source code is read."""
    body: list[Any] = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    pairs: list[Any] = [(field, text) for field, text in pairwise(body) if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)]
    return {field.target.id: " ".join(text.value.value.split()) for field, text in pairs if field.target.id not in NOT_WRITTEN}
