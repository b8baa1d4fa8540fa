"""Write a plan as DOT text for Graphviz. Modules are clusters, casts are diamonds."""

from __future__ import annotations

import json
from typing import Any

from amprewrite.ir.plans.plan import ModelPlan, shape_of
from amprewrite.report.counts import by_region
from amprewrite.report.pictures.graph import Drawing, draw
from amprewrite.report.pictures.svg import CAST, INK_OF, TINT
from amprewrite.tables.boundary.files import write_text
from amprewrite.tables.boundary.printable import printable


def to_dot(plan: ModelPlan, path: Any = None) -> str:
    """Return the graph as DOT text, and write it to `path` if given. Raises EmitError if `path` cannot be written."""
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
    """Return `text` as a quoted DOT string. Line ends are kept for labels.

    JSON's escapes are valid in DOT once `printable` has replaced control characters.
    """
    return json.dumps("\n".join(map(printable, text.split("\n"))), ensure_ascii=False)
