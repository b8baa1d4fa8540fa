"""A plan in HTML: a report (one self-contained file that loads nothing from the network), and a fragment for notebooks.

This module collects the data of the report, and `assets/report.*` draw it. The data is JSON with `<` escaped, so that no name in a
model can end the script or add markup.

The fragment holds the summary, a table of modules, and the graph if it is small.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from amprewrite.ir.plans.plan import ModelPlan, NodePlan, shape_of
from amprewrite.report.counts import amount, by_impact, cast_kind, casts_by_kind, folded, module_tree, node_bytes, share
from amprewrite.report.pictures.layout import Drawing, draw
from amprewrite.report.pictures.svg import HIGH, LOW, to_svg
from amprewrite.report.questions.explain import WhatIf, bare_name, region_of, what_would_change
from amprewrite.tables.boundary.files import write_text
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.vocabulary import Colour

SECONDS = 5.0
"""Default time limit in seconds for trial plans, which show the changes that would give a node its other colour (low or high)."""


def to_html(plan: ModelPlan, path: Any, title: str = "", report: Any = None) -> Path:
    """Write the HTML report of `html(plan, title, report)` to `path`, and return the path. Raises EmitError if `path` cannot be written."""
    return write_text(path, html(plan, title, report))


def html(plan: ModelPlan, title: str = "", report: Any = None, seconds: float = SECONDS) -> str:
    """Return the report as HTML text.

    `title` is the heading; "" for "Cast plan". `report`, a result of `verify` or `debug` for the same model, adds errors. `seconds`
    limits the time for trial plans, which show the changes that would give a node its other colour (low or high).
    """
    data = json.dumps(payload(plan, title, report, seconds), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = asset("report.html")
    for mark, text in (("/*CSS*/", asset("report.css")), ("/*JS*/", asset("report.js")), ("/*DATA*/", data)):
        page = page.replace(mark, text, 1)
    return page


@cache
def asset(name: str) -> str:
    return (resources.files("amprewrite.report.html") / "assets" / name).read_text(encoding="utf-8")


# -- facts -----------------------------------------------------------------------------
def payload(plan: ModelPlan, title: str, report: Any, seconds: float) -> dict[str, Any]:
    """Return the data that the HTML report draws, as values for JSON. The arguments are the same as for `html`.

    The keys for a node's data have one letter, because there may be thousands of nodes.
    """
    drawing = draw(plan)
    ops = [node for node in plan.nodes if node.role == "op" and node.colour is not Colour.PLAIN]
    flips = _flips(plan, drawing, seconds)
    rows = {row.name: row for row in getattr(report, "rows", ())}
    weights = Counter(user for cast in plan.casts if cast.weight for user in cast.users)
    place = {node.name: index for index, node in enumerate(drawing.nodes)}
    return {
        "title": title or "Cast plan",
        "low": plan.low,
        "lists": plan.lists,
        "mode": "training" if any(region.training for region in plan.regions) else "inference",
        "graphs": len(plan.regions),
        "hidden": drawing.hidden,
        "nodes": [
            _node(node, flips.get(node.name, []), rows.get(node.name), weights[node.name], _fp8(plan, node)) for node in drawing.nodes
        ],
        "edges": [[edge.source, edge.target, edge.cast] for edge in drawing.edges],
        "boxes": [[b.path, b.label, b.parent, b.parts, b.layers, b.chains] for b in drawing.nest.boxes],
        "casts": [
            [place.get(cast.value, -1), cast.value, cast.to, [place[user] for user in cast.users if user in place], cast.saturate]
            for cast in plan.casts
            if not cast.weight
        ],
        "kinds": casts_by_kind(plan.casts),
        "weights": sum(cast_kind(cast) == "weights to low" for cast in plan.casts),
        "share": {
            "ops": [sum(node.colour is colour for node in ops) for colour in (Colour.LOW, Colour.HIGH)],
            "FLOPs": [sum(node.flops for node in ops if node.colour is colour) for colour in (Colour.LOW, Colour.HIGH)],
            "bytes": [sum(node_bytes(node) for node in ops if node.colour is colour) for colour in (Colour.LOW, Colour.HIGH)],
        },
        "modules": _modules(plan),
        "heavy": [place[node.name] for node in by_impact(plan)],
        "notes": [*plan.notes, *(note for region in plan.regions for note in region.notes), *getattr(report, "notes", ())],
        "skipped": [[part.where, part.why] for part in plan.skipped],
        "error": _number(getattr(report, "output_error", None)),
    }


def _fp8(plan: ModelPlan, node: NodePlan) -> list[str]:
    """Return sentences on the formats of the GEMMs that compute `node` or its gradients, and on fp8 copies of its result; [] if none."""
    return [line.strip() for line in region_of(plan, node).quantised.about(bare_name(plan, node))]


def _node(node: NodePlan, flips: list[str], row: Any, weights: int, fp8: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "n": node.name, "o": node.op, "c": node.colour.value, "r": node.reason.value, "w": node.why(), "d": node.dtype,
        "s": shape_of(node), "m": node.module, "f": node.source, "x": node.flops, "b": node_bytes(node),
        "k": node.kind.value if node.kind else "", "p": node.role, "q": weights, "z": flips, "g": fp8,
    }  # fmt: skip
    if row is not None:
        keys = ("introduced", "inherited", "accumulated", "largest", "smallest", "overflow", "underflow")
        found["e"] = {key: value for key in keys if (value := _number(getattr(row, key, None))) is not None}
    return {key: value for key, value in found.items() if value not in ("", [], 0) or key in ("n", "c")}


def _number(value: Any) -> float | str | None:
    """Return `value` rounded for JSON: "inf" for infinity, None for a missing measurement (None or NaN)."""
    if value is None or math.isnan(value):
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else "inf"


def _modules(plan: ModelPlan) -> list[list[Any]]:
    """Return a row for each module: [depth, path, name, ops, low ops, high ops, casts, casts of weights, FLOPs, low FLOPs]."""
    rows: list[list[Any]] = []

    def walk(row: Any, depth: int) -> None:
        rows.append([depth, row.path, row.name, row.ops, row.low, row.high, row.casts, row.weight_casts, row.flops, row.low_flops])
        for part in row.parts.values():
            walk(part, depth + 1)

    walk(module_tree(plan), 0)
    return rows


def _flips(plan: ModelPlan, drawing: Drawing, seconds: float) -> dict[str, list[str]]:
    """Return {node: sentences on changes that would give the node its other colour (low or high)}.

    The changes are found by planning the graph anew, for at most `seconds` in all. High nodes are tried before low nodes. Among the
    high nodes, and among the low, nodes next to casts come first. A node for which no time is left gets at most one sentence, which follows
    from its recorded reason, such as "it would run low in bf16".
    """
    until = time.monotonic() + seconds
    asked = {region.name: WhatIf.of(region) for region in plan.regions} if seconds > 0 else {}
    edges = {end for edge in drawing.edges if edge.cast for end in (edge.source, edge.target)}
    order = sorted(enumerate(drawing.nodes), key=lambda item: (item[1].colour is Colour.LOW, item[0] not in edges))
    found = {}
    for _, node in order:
        region = region_of(plan, node)
        trial = asked.get(region.name) if time.monotonic() < until else None
        found[node.name] = what_would_change(node, bare_name(plan, node), plan.low, trial)
    return found


MOST_DRAWN = 60
"""A fragment draws the graph below the table if the plan has at most this many ops."""
ROWS = 24
"""Largest number of rows of the table of modules."""


def to_notebook(plan: ModelPlan, summary: str) -> str:
    """Return the plan as an HTML fragment that needs no stylesheet and no script. `summary` is the text at its top."""
    cell = 'style="padding:2px 10px;text-align:right;white-space:nowrap"'
    first = 'style="padding:2px 10px;text-align:left;white-space:nowrap"'
    rows = []
    for depth, row in folded(module_tree(plan), ROWS):
        name = "&nbsp;" * 3 * depth + escape(printable(row.name) or "the model") + (f" ({row.times}×)" if row.times > 1 else "")
        whole = max(row.low + row.high, 1)
        bar = (
            f'<div style="width:70px;height:7px;border-radius:3px;overflow:hidden;background:{HIGH if row.high else "#ccc"}">'
            f'<div style="width:{100 * row.low / whole:.0f}%;height:7px;background:{LOW}"></div></div>'
        )
        flops = amount(row.flops) if row.flops else "-"
        values = (str(row.ops), str(row.casts), str(row.weight_casts), flops, share(row.low_flops, row.flops))
        cells = "".join(f"<td {cell}>{value}</td>" for value in values)
        rows.append(f"<tr><td {first}>{name}</td><td {first}>{bar}</td>{cells}</tr>")
    titles = "".join(f"<th {cell}>{title}</th>" for title in ("ops", "casts", "weights", "FLOPs", "low"))
    head = f"<tr><th {first}>module</th><th {first}>low, high</th>{titles}</tr>"
    table = f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
    lines = "<br>".join(escape(line) for line in summary.splitlines())
    drawing = ""
    if sum(node.role == "op" for node in plan.nodes) <= MOST_DRAWN:
        frame = "max-width:100%;overflow:auto;background:#fff"
        drawing = f'<details><summary>graph</summary><div style="{frame}">{to_svg(plan)}</div></details>'
    return f'<div><p style="margin:4px 0">cast plan, low = {escape(plan.low)}: {lines}</p>{table}{drawing}</div>'
