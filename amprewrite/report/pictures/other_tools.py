"""Write a plan for tools that draw graphs: DOT text for Graphviz, and node data for Google's Model Explorer.

In DOT text, modules are clusters and casts are diamonds. Model Explorer makes its own graph of the model, and shows each op's format on it.
Node data (https://github.com/google-ai-edge/model-explorer/wiki/6.-Develop-Custom-Node-Data) is a JSON object with `results` by node id.
Values are words such as "bf16", so that a module shows how many of its ops run in each format. Model Explorer finds a node by its id
or by the name of its output tensor. These match a plan's names in the planned ONNX file, and in an exported program with the same ops.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from amprewrite.ir.plans.plan import ModelPlan, shape_of
from amprewrite.report.counts import by_region
from amprewrite.report.pictures.layout import Drawing, draw
from amprewrite.report.pictures.svg import CAST, INK_OF, TINT
from amprewrite.tables.boundary.files import write_text
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.vocabulary import Colour


def to_dot(plan: ModelPlan, path: Any = None) -> str:
    """Return the plan's graphs as DOT text, and write the text to `path` if given. Raises EmitError if `path` cannot be written."""
    drawing = draw(plan)
    lines = [
        "digraph plan {",
        f"  label={_quoted(f'cast plan, low = {plan.low}')}; labelloc=t; rankdir=TB;",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=11]; edge [color="#6b7686", arrowsize=0.7];',
        *_cluster(drawing, drawing.nest.count, 1),
    ]
    casts = {(cast.value, cast.to): index for index, cast in enumerate(c for _, each in by_region(plan) for c in each)}
    drawn: set[int] = set()
    for edge in drawing.edges:
        source, target = f"n{edge.source}", f"n{edge.target}"
        if not edge.cast:
            lines.append(f"  {source} -> {target};")
            continue
        number = casts[drawing.nodes[edge.source].name, edge.cast]
        if number not in drawn:
            drawn.add(number)
            lines.append(f'  c{number} [shape=diamond, label={_quoted(edge.cast)}, fillcolor="#f1e8fd", color="{CAST}", fontsize=9];')
            lines.append(f'  {source} -> c{number} [color="{CAST}"];')
        lines.append(f'  c{number} -> {target} [color="{CAST}"];')
    text = "\n".join([*lines, "}"]) + "\n"
    if path is not None:
        write_text(path, text)
    return text


def _cluster(drawing: Drawing, number: int, depth: int) -> list[str]:
    pad = "  " * depth
    lines = []
    for part in drawing.nest.box(number).parts:
        if part >= drawing.nest.count:
            label = _quoted(drawing.nest.box(part).label)
            lines.append(f'{pad}subgraph cluster_{part} {{ label={label}; style=rounded; color="#c4cbd6"; fontname="Helvetica";')
            lines += [*_cluster(drawing, part, depth + 1), f"{pad}}}"]
            continue
        node = drawing.nodes[part]
        label = f"{node.op}\n{shape_of(node)} {node.dtype}" if node.role == "op" else node.name
        tip = node.why() if node.role == "op" else node.role
        paint = f'fillcolor="{TINT[node.colour]}", color="{INK_OF[node.colour]}"'
        lines.append(f"{pad}n{part} [label={_quoted(label)}, tooltip={_quoted(tip)}, {paint}];")
    return lines


def _quoted(text: str) -> str:
    """Return `text` as a quoted DOT string for a label. Line breaks are kept.

    DOT reads JSON's escapes of quotes, backslashes and line breaks. `printable` first replaces all other control characters.
    """
    return json.dumps("\n".join(map(printable, text.split("\n"))), ensure_ascii=False)


LOW, HIGH = "#bfe8e2", "#f8d8a8"


def to_model_explorer(plan: ModelPlan, path: Any, graph: str = "main") -> Path:
    """Write node data for Model Explorer's graph called `graph`, and return the path. Raises EmitError if `path` cannot be written."""
    return write_text(path, json.dumps(node_data(plan, graph), indent=1))


def node_data(plan: ModelPlan, graph: str = "main") -> dict[str, Any]:
    """Return node data for Model Explorer, for `json.dumps`: {graph: {"results": {node: {"value": "bf16", "bgColor": "#bfe8e2"}}, …}}."""
    results: dict[str, Any] = {}
    for node in (node for region in plan.regions for node in region.nodes):
        if node.role == "op" and node.colour is not Colour.PLAIN:
            low = node.colour is Colour.LOW
            results[node.name] = {"value": node.dtype, "bgColor": LOW if low else HIGH}
    return {graph: {"results": results, "showExpandedSummaryOnGroupNode": True, "showLabelCountColumnsInChildrenStatsTable": True}}
