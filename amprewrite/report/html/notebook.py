"""Make the HTML fragment that a notebook shows for a plan: the summary, a table of modules, and the graph if it is small."""

from __future__ import annotations

from html import escape

from amprewrite.ir.plans.plan import ModelPlan
from amprewrite.report.counts import amount, folded, module_tree, share
from amprewrite.report.pictures.svg import HIGH, LOW, to_svg
from amprewrite.tables.boundary.printable import printable

MOST_DRAWN = 60
"""Largest number of ops of a plan whose graph is drawn below the table."""
ROWS = 24
"""Largest number of rows of the table of modules."""


def to_notebook(plan: ModelPlan, summary: str) -> str:
    """Return the plan as an HTML fragment with inline styles, which needs no stylesheet and no script. `summary` is the text at its top."""
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
