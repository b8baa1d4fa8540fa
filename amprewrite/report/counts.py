"""Numbers that several views of a plan show, such as bytes of a result and casts by kind, and the listing of a plan as text.

A listing is the graph as code with one annotated op per line, or a table with one module or one op per row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from amprewrite.ir.plans.plan import Cast, ModelPlan, NodePlan, RegionPlan, shape_of
from amprewrite.ir.plans.product_plan import QuantisedCopy
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.formats import FORMATS, OUT
from amprewrite.tables.vocabulary import Colour, Edit

_OTHERS = {"fp64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
BYTES = {row.name: row.bytes for row in FORMATS.values()} | _OTHERS
"""Bytes of one element, by dtype. Dtypes that are missing here count as 0 bytes."""


def node_bytes(node: NodePlan) -> int:
    """Return the bytes of a node's result in its planned dtype; 0 for a 0-dim tensor or unknown shape. A symbolic dim counts as size 1."""
    return math.prod(size for size in node.shape if isinstance(size, int)) * BYTES.get(node.dtype, 0) if node.shape else 0


def by_region(plan: ModelPlan) -> Iterator[tuple[tuple[NodePlan, ...], tuple[Cast, ...]]]:
    """Yield (nodes, casts) for each graph of the plan. If the plan has several graphs, names have the form "graph/node"."""
    nodes, casts = iter(plan.nodes), iter(plan.casts)
    for region in plan.regions:
        yield tuple(next(nodes) for _ in region.nodes), tuple(next(casts) for _ in region.casts)


def cast_kind(cast: Cast) -> str:
    """Return the kind of a cast: "weights to low", "activations to low" or "activations to fp32"."""
    if cast.weight:
        return "weights to low"
    return "activations to fp32" if cast.to == "fp32" else "activations to low"


def casts_by_kind(casts: Iterable[Cast]) -> dict[str, int]:
    found = Counter(map(cast_kind, casts))
    return {kind: found[kind] for kind in ("weights to low", "activations to low", "activations to fp32")}


def fp8_counts(plan: ModelPlan) -> list[str]:
    """Return a list with one line, the number of GEMMs that run in fp8; [] if the planner considered fp8 for no matrix product."""
    if not any(region.quantised for region in plan.regions):
        return []
    weighed = [each for region in plan.regions for each in region.quantised.products]
    gemms = [gemm for each in weighed for gemm in each.gemms]
    flops = sum(node.flops for region in plan.regions for node in region.nodes)
    sizes = {(region.name, node.name): node.flops for region in plan.regions for node in region.nodes}
    out = sum(sizes[region.name, each.node] for region in plan.regions for each in region.quantised.products if each.takes(OUT))
    copies = sum(len(region.quantised.copies) for region in plan.regions)
    return [
        f"fp8: {sum(each.fp8 for each in gemms)} of {len(gemms)} GEMMs of {len(weighed)} products, {share(out, flops)} of forward FLOPs; "
        f"{copies} copies"
    ]


def is_heavy_high(region: RegionPlan, node: NodePlan) -> bool:
    """True if `node` of `region` (the plan of one graph) is a matmul or convolution that multiplies fp32 operands.

    False if the model's own code runs the op in half precision or fp64. False for wide products: they read low operands and return fp32.
    """
    heavy = node.role == "op" and node.flops > 0 and node.colour is Colour.HIGH
    names = (node.name, node.name.partition("/")[2])  # an edit names the node with or without the prefix "region/"
    return heavy and region.edited(Edit.WIDE_PRODUCT).keys().isdisjoint(names)


def by_impact(plan: ModelPlan) -> list[NodePlan]:
    """Return the matmuls and convolutions that multiply fp32 operands, most FLOPs first."""
    return sorted((node for region, node in plan.in_regions() if is_heavy_high(region, node)), key=lambda node: -node.flops)


@dataclass
class ModuleRow:
    """One row of the table of modules: the ops, casts, FLOPs and bytes of a module, including its submodules."""

    path: str
    """Path of the module; "" for the model."""
    ops: int = 0
    low: int = 0
    high: int = 0
    casts: int = 0
    """Casts of activations whose first reader is in this module."""
    weight_casts: int = 0
    """Casts of weights whose first reader is in this module."""
    flops: int = 0
    low_flops: int = 0
    bytes: int = 0
    """Bytes of the results of all ops after the rewrite."""
    times: int = 1
    """Number of sibling modules with equal counts that share this row."""
    name: str = ""
    """Name in a table: the last part of the path, several parts if a module only wraps a submodule, or a range such as "0..11"."""
    parts: dict[str, ModuleRow] = field(default_factory=dict)
    """Rows of the submodules, by name."""

    def counts(self) -> tuple[int, ...]:
        return (self.ops, self.low, self.high, self.casts, self.weight_casts, self.flops, self.low_flops, self.bytes)

    def add(self, node: NodePlan, casts: int, weight_casts: int) -> None:
        low = node.colour is Colour.LOW
        self.ops += 1
        self.low += low
        self.high += node.colour is Colour.HIGH
        self.casts += casts
        self.weight_casts += weight_casts
        self.flops += node.flops
        self.low_flops += node.flops * low
        self.bytes += node_bytes(node)


def module_tree(plan: ModelPlan) -> ModuleRow:
    """Return the row of the root module: its numbers, and in `parts` the rows of its submodules."""
    root = ModuleRow("")
    for nodes, casts in by_region(plan):
        first = Counter((cast.users[0], cast.weight) for cast in casts if cast.users)
        for node in nodes:
            if node.role != "op":  # the output of a graph is in no module, so count its casts at the root
                root.casts += first[node.name, False]
                root.weight_casts += first[node.name, True]
                continue
            here, path = root, ""
            counted = first[node.name, False], first[node.name, True]
            here.add(node, *counted)
            for part in node.module.split(".") if node.module else ():
                path = f"{path}.{part}" if path else part
                here = here.parts.setdefault(part, ModuleRow(path, name=part))
                here.add(node, *counted)
    return _joined(root)


def _joined(row: ModuleRow) -> ModuleRow:
    """Return the tree `row` with fewer rows: a module and its only submodule share a row if all ops of the module are in the submodule."""
    row.parts = {name: _joined(part) for name, part in row.parts.items()}
    if len(row.parts) == 1 and row.name:
        (part,) = row.parts.values()
        if part.ops == row.ops:
            return replace(part, name=f"{row.name}.{part.name}")
    return row


def folded(root: ModuleRow, most: int = 40) -> list[tuple[int, ModuleRow]]:
    """Return at most `most` pairs (depth, row of a module) for a table. Modules are expanded from the root down while all rows fit.

    Neighbouring numbered siblings with equal counts, such as layers 0 to 11, share a row.
    """
    opened: set[str] = set()
    rows = [(0, root)]
    while True:
        candidates = [row for _, row in rows if row.parts and row.path not in opened]
        candidates.sort(key=lambda row: (-row.high * bool(row.low), row.path.count("."), -row.ops))
        for each in candidates:
            tried = _shown(root, opened | {each.path})
            if len(tried) <= most:
                opened.add(each.path)
                rows = tried
                break
        else:
            return rows


def _shown(root: ModuleRow, opened: set[str]) -> list[tuple[int, ModuleRow]]:
    rows: list[tuple[int, ModuleRow]] = []

    def walk(row: ModuleRow, depth: int) -> None:
        rows.append((depth, row))
        if row.path in opened:
            for part in merged(row.parts):
                walk(part, depth + 1)

    walk(root, 0)
    return rows


def merged(parts: Mapping[str, ModuleRow]) -> list[ModuleRow]:
    """Return the rows of sibling modules. Neighbours with a number as name and equal counts, such as layers 0 to 11, become one row."""
    rows: list[ModuleRow] = []
    for (numbered, _), group in groupby(parts.values(), key=lambda row: (row.name.isdigit(), row.counts())):
        alike = list(group)
        if not numbered or len(alike) == 1:
            rows += alike
            continue
        first, last = alike[0], alike[-1]
        rows.append(replace(first, name=f"{first.name}..{last.name}", times=len(alike)))
    return rows


def amount(number: float, unit: str = "") -> str:
    """Format a number with at most three digits, a metric prefix from 1000 on, and `unit`: "0.5", "1.2 G", or "34 kB" with the unit "B"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * size:  # 999.7 takes the next prefix, because three digits show it as 1000
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".strip()


def share(part: float, whole: float) -> str:
    """Return the ratio of `part` to `whole` as a percentage, such as "12 %"; "-" if `whole` is 0."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


SCREEN = 40
"""Largest number of rows of the table of modules, so that it fits one screen."""


@dataclass(frozen=True)
class Line:
    """One line of a listing, before columns are aligned."""

    kind: str
    """Kind of the line: graph, module, cast, note, or the colour of an op."""
    code: str
    dtype: str = ""
    shape: str = ""
    source: str = ""
    why: str = ""


def listing(plan: ModelPlan, fold: bool = False, width: int = 0) -> str:
    """Return the plan as code, or with `fold` as a table of modules. Lines are cut to `width` characters; 0 means no limit."""
    found = fold_table(plan) if fold else laid_out(list(code_lines(plan)))
    return "\n".join(line if not width or len(line) <= width else f"{line[: width - 1]}…" for _, line in found)


def code_lines(plan: ModelPlan) -> Iterator[Line]:
    """Yield a line for each op, cast and fp8 copy, in the order in which they run, with a header for each graph and module, and notes."""
    for region, (nodes, casts) in zip(plan.regions, by_region(plan), strict=True):
        state = "training" if region.training else "inference"
        count = "casts follow" if plan.casts_follow else f"{len(casts)} casts"
        yield Line("graph", f"# {region.name}, {state}: {sum(n.role == 'op' for n in nodes)} ops, {count}")
        prefix = f"{region.name}/" if len(plan.regions) > 1 else ""
        made: dict[str, list[Cast]] = {}
        for cast in casts:
            made.setdefault(cast.users[0] if cast.users else "", []).append(cast)
        reads = {(cast.value, user): cast.to for cast in casts for user in cast.users}
        first: dict[str, list[QuantisedCopy]] = {}
        for copy in region.quantised.copies:
            first.setdefault(f"{prefix}{copy.readers[0].rpartition('.')[0]}" if copy.role != "g" else "", []).append(copy)
            reads |= {(prefix + copy.value, f"{prefix}{r.rpartition('.')[0]}"): copy.to for r in copy.readers if r.endswith(f".{OUT}")}
        for module, group in groupby((n for n in nodes if n.role == "op"), key=lambda node: node.module):
            inside = list(group)
            yield Line("module", f"# {module or 'the model'}: {_tally(inside)}")
            for node in inside:
                for cast in made.pop(node.name, ()):
                    yield _cast_line(cast, module, prefix)
                for copy in first.get(node.name, ()):
                    value = _short(prefix + copy.value, module, prefix)
                    code = f"{value}:{copy.to} = quantise({value}, {copy.scales})"
                    yield Line("cast", code, copy.to, why=f"for {', '.join(copy.readers)}")
                values = (prefix + value for value in node.inputs)
                operands = ", ".join(_short(value, module, prefix, reads.get((value, node.name), "")) for value in values)
                code = f"{node.name.removeprefix(prefix)} = {node.op}({operands or '…'})"
                yield Line(node.colour.value, code, node.dtype, shape_of(node), node.source, node.why())
        if made:
            yield Line("module", "# results")
            yield from (_cast_line(cast, "", prefix) for left in made.values() for cast in left)
        yield from (Line("note", f"# note: {note}") for note in region.notes)


def _cast_line(cast: Cast, module: str, prefix: str) -> Line:
    users = len(cast.users)
    why = f"one copy for {users} readers" if users > 1 else " ".join(f"for {each.removeprefix(prefix)}" for each in cast.users)
    clamp = ".clamp(finite)" * cast.saturate
    code = f"{_short(cast.value, module, prefix, cast.to)} = {_short(cast.value, module, prefix)}{clamp}.to({cast.to})"
    return Line("cast", code, cast.to, "", "", f"{why}{', a weight' * cast.weight}")


def _short(value: str, module: str, prefix: str, to: str = "") -> str:
    """Return the name `value` as a listing of the plan shows it among the ops of `module`.

    A parameter of this module becomes "self.weight". `prefix`, the name of the graph in a plan of several graphs, is removed. If `to` is
    the format of a cast copy, such as "bf16", ":bf16" is added.
    """
    name = value.removeprefix(prefix)
    name = f"self{name[len(module) :]}" if module and name.startswith(f"{module}.") else name
    return f"{name}:{to}" if to else name


def _tally(nodes: list[NodePlan]) -> str:
    low, high = (sum(node.colour is colour for node in nodes) for colour in (Colour.LOW, Colour.HIGH))
    return f"{low} low, {high} high"


def laid_out(lines: list[Line]) -> list[tuple[str, str]]:
    """Align the columns of `lines`. Return each line as (kind, text). The kind is graph, module, cast, note, or the colour of an op."""
    code = min(max((len(line.code) for line in lines if line.kind not in ("graph", "module", "note")), default=0), 72)
    shape = max((len(line.shape) for line in lines), default=0)
    source = max((len(line.source) for line in lines), default=0)
    found = []
    for line in lines:
        if line.kind in ("graph", "module", "note"):
            found.append((line.kind, ("" if line.kind == "graph" else "  ") + printable(line.code)))
            continue
        text = f"    {line.code:{code}}  {line.kind:5}  {line.dtype or '-':5}  {line.shape:{shape}}  {line.source:{source}}  {line.why}"
        found.append((line.kind, printable(text.rstrip())))
    return found


def fold_table(plan: ModelPlan, most: int = SCREEN) -> list[tuple[str, str]]:
    """Return the lines of a table with one module per row, at most `most` lines of 80 characters.

    Each line is (kind, text). The kind is "title", or the colour of the module's ops: "low" if any op is low, otherwise "high" if any is
    high, otherwise "plain".
    """
    root = module_tree(plan)
    rows = folded(root, most - 1)
    titles = ("ops", "low", "high", "casts", "weights", "FLOPs", "low", "bytes")
    cells = [_cells(row) for _, row in rows]
    widths = [max(len(title), *(len(row[column]) for row in cells)) for column, title in enumerate(titles)]
    left = 80 - sum(widths) - 2 * len(widths)
    found = [("title", _row("module", titles, left, widths))]
    for (depth, row), values in zip(rows, cells, strict=True):
        name = "  " * depth + (printable(row.name) or "the model")
        name += f" ({row.times}×)" if row.times > 1 else ""
        name = name if len(name) <= left else f"{name[: left - 1]}…"
        found.append(("high" if row.high and not row.low else "low" if row.low else "plain", _row(name, values, left, widths)))
    return found


def _cells(row: ModuleRow) -> tuple[str, ...]:
    return (
        str(row.ops), str(row.low), str(row.high), str(row.casts), str(row.weight_casts),
        amount(row.flops) if row.flops else "-", share(row.low_flops, row.flops), amount(row.bytes, "B"),
    )  # fmt: skip


def _row(name: str, values: tuple[str, ...], left: int, widths: list[int]) -> str:
    return f"{name:{left}}" + "".join(f"  {value:>{width}}" for value, width in zip(values, widths, strict=True))


def op_table(plan: ModelPlan) -> str:
    """Return a text table with one op per row: calls and FLOPs in the low format and in fp32. The rows with most FLOPs come first."""
    found: dict[str, list[int]] = {}
    for node in plan.nodes:
        if node.role == "op" and node.colour is not Colour.PLAIN:
            counts, high = found.setdefault(node.op, [0, 0, 0, 0]), node.colour is Colour.HIGH
            counts[high] += 1
            counts[2 + high] += node.flops
    ordered = sorted(found.items(), key=lambda row: (-sum(row[1][2:]), -sum(row[1][:2]), row[0]))
    rows = [(op, *(str(calls or "-") for calls in row[:2]), *(amount(flops) if flops else "-" for flops in row[2:])) for op, row in ordered]
    rows.insert(0, ("op", plan.low, "fp32", f"FLOPs {plan.low}", "FLOPs fp32"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[f"  {text:>{width}}" for text, width in zip(row[1:], widths[1:], strict=True)] for row in rows]
    return "\n".join(f"{row[0]:{widths[0]}}" + "".join(line) for row, line in zip(rows, cells, strict=True))
