"""List a plan as text: its graph as code with one annotated op per line, or a table with one module or one op per row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from amprewrite.ir.plans.plan import Cast, ModelPlan, NodePlan, shape_of
from amprewrite.ir.plans.product_plan import QuantisedCopy
from amprewrite.report.counts import ModuleRow, amount, by_region, folded, module_tree, share
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.formats import OUT
from amprewrite.tables.vocabulary import Colour

SCREEN = 40
"""Largest number of rows of the table of modules."""


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
    """Return the plan as code, or with `fold` as a table of modules. Lines are cut to `width` characters; 0 cuts none."""
    found = fold_table(plan) if fold else laid_out(list(code_lines(plan)))
    return "\n".join(line if not width or len(line) <= width else f"{line[: width - 1]}…" for _, line in found)


def code_lines(plan: ModelPlan) -> Iterator[Line]:
    """Yield the lines of the listing in running order, with a header for each graph and at each change of module."""
    for region, (nodes, casts) in zip(plan.regions, by_region(plan), strict=True):
        state = "training" if region.training else "inference"
        yield Line("graph", f"# {region.name}, {state}: {sum(n.role == 'op' for n in nodes)} ops, {len(casts)} casts")
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
    why = f"one copy for {users} readers" if users > 1 else f"for {cast.users[0].removeprefix(prefix)}"
    clamp = ".clamp(finite)" * cast.saturate
    code = f"{_short(cast.value, module, prefix, cast.to)} = {_short(cast.value, module, prefix)}{clamp}.to({cast.to})"
    return Line("cast", code, cast.to, "", "", f"{why}{', a weight' * cast.weight}")


def _short(value: str, module: str, prefix: str, to: str = "") -> str:
    """Return a value's name relative to the reader's `module`, such as "self.weight", followed by ":" and the format `to` if given.

    `prefix` is dropped from the name: it names the region, in a plan of several graphs.
    """
    name = value.removeprefix(prefix)
    name = f"self{name[len(module) :]}" if module and name.startswith(f"{module}.") else name
    return f"{name}:{to}" if to else name


def _tally(nodes: list[NodePlan]) -> str:
    low, high = (sum(node.colour is colour for node in nodes) for colour in (Colour.LOW, Colour.HIGH))
    return f"{low} low, {high} high"


def laid_out(lines: list[Line]) -> list[tuple[str, str]]:
    """Align the columns of `lines`. Return each line as (kind, text)."""
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

    Each line is (kind, text). The kind is "title", or the colour of the module's ops: "high" or "low", "plain" without either. A module
    with both is "low".
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
    """Return a text table of the ops, by most FLOPs, then most calls: for each op, its calls and FLOPs in the low format and in fp32."""
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
