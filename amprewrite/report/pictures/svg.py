"""Draw a plan as SVG or PNG, for papers and READMEs. The drawing is the same as in the HTML report, but static."""

from __future__ import annotations

from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from amprewrite.ir.plans.plan import ModelPlan, shape_of
from amprewrite.report.pictures.layout import Drawing, Placed, Rect, draw, place
from amprewrite.tables.boundary.files import write_bytes, write_text
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.errors import EmitError
from amprewrite.tables.vocabulary import Colour

LOW, HIGH, CAST, INK, SOFT, LINE = "#0b8c82", "#c96f06", "#8b3fe0", "#171c26", "#6b7686", "#d5dae2"
TINT = {Colour.LOW: "#e3f4f1", Colour.HIGH: "#fdf1df", Colour.PLAIN: "#eceef3"}
INK_OF = {Colour.LOW: LOW, Colour.HIGH: HIGH, Colour.PLAIN: SOFT}
OP, END, SHUT = (150.0, 40.0), (104.0, 26.0), (190.0, 48.0)
"""(Width, height) of the rectangle of an op, of an input or output, and of a closed module."""
MOST_OPEN = 90
"""Largest number of ops and closed modules in a drawing if the caller gives no depth."""
MARGIN = 12.0


def to_svg(plan: ModelPlan, path: Any = None, depth: int | None = None) -> str:
    """Return the graph as SVG text, and write it to `path` if given.

    Modules down to level `depth` are drawn open, and modules of the next level as closed boxes. If `depth` is None, modules are opened
    level by level, as long as at most `MOST_OPEN` ops and closed modules are visible. Raises EmitError if `path` cannot be written.
    """
    drawing = draw(plan)
    placed = place(drawing.nest, _sizes(drawing), _opened(drawing, depth))
    root = placed.rects[drawing.nest.count]
    width, height = root.w + 2 * MARGIN, root.h + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-MARGIN:g} {-MARGIN:g} {width:.1f} {height:.1f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f"<title>cast plan, low = {escape(plan.low)}</title>",
        *_boxes(drawing, placed),
        *_lines(drawing, placed),
        *_ops(drawing, placed),
        *_casts(drawing, placed),
        "</svg>",
    ]
    text = "\n".join(parts) + "\n"
    if path is not None:
        write_text(path, text)
    return text


def to_png(plan: ModelPlan, path: Any, depth: int | None = None, scale: float = 2.0) -> Path:
    """Write the drawing as a PNG file with `scale` pixels per SVG unit, and return its path.

    `depth` is as for `to_svg`. Raises EmitError if the png extra is not installed, or if `path` cannot be written.
    """
    try:
        import resvg_py
    except ImportError as error:
        raise EmitError("a PNG needs resvg_py, which is not installed: pip install 'amprewrite[png]'") from error
    picture = bytes(resvg_py.svg_to_bytes(svg_string=to_svg(plan, None, depth), zoom=scale, background="white"))
    return write_bytes(path, picture)


def _sizes(drawing: Drawing) -> dict[int, tuple[float, float]]:
    sizes = {index: OP if node.role == "op" else END for index, node in enumerate(drawing.nodes)}
    return sizes | {box.id: SHUT for box in drawing.nest.boxes}


def _opened(drawing: Drawing, depth: int | None) -> set[int]:
    """Return the ids of the boxes to draw open: all boxes down to level `depth`.

    If `depth` is None, boxes are opened level by level, as long as at most `MOST_OPEN` ops and closed boxes are visible.
    """
    nest = drawing.nest
    level = {nest.count: 0}
    for box in nest.boxes[1:]:
        level[box.id] = level[box.parent] + 1
    if depth is not None:
        return {number for number, deep in level.items() if deep <= max(depth, 0)}
    opened, seen = {nest.count}, len(nest.boxes[0].parts)
    for number in sorted(level, key=level.__getitem__)[1:]:
        more = len(nest.box(number).parts) - 1
        if nest.box(number).parent in opened and seen + more <= MOST_OPEN:
            opened.add(number)
            seen += more
    return opened


def _seen(drawing: Drawing, placed: Placed, op: int) -> int:
    """Return the id of the visible box or op that stands for `op`: the outermost closed box around it, or the op itself if all are open."""
    way = drawing.nest.path_of(op)
    return next((number for number in reversed(way[1:]) if number not in placed.open), op)


def _boxes(drawing: Drawing, placed: Placed) -> list[str]:
    found = []
    for box in drawing.nest.boxes[1:]:
        if box.id not in placed.rects or box.id not in placed.open:
            continue
        r = placed.rects[box.id]
        found.append(f'<rect {_frame(r)} rx="10" fill="#fff" fill-opacity=".7" stroke="{LINE}"/>')
        found.append(_text(r.x + 12, r.y + 17, box.label, r.w - 20, SOFT, 'font-weight="bold" font-size="11"'))
    return found


def _ops(drawing: Drawing, placed: Placed) -> list[str]:
    found = []
    for number, r in placed.rects.items():
        if number in placed.open:
            continue
        if number >= drawing.nest.count:
            found += _closed(drawing, number, placed)
            continue
        node = drawing.nodes[number]
        ink = INK_OF[node.colour]
        if node.role != "op":
            found.append(f'<rect {_frame(r)} rx="13" fill="#eceef3" stroke="#9aa6b6"/>')
            found.append(_text(r.x + r.w / 2, r.y + 17, node.name.rpartition("/")[2], r.w - 12, INK, 'text-anchor="middle"'))
            continue
        tip = escape(printable(f"{node.name}: {node.why()}"))
        found.append(
            f'<g><title>{tip}</title><rect {_frame(r)} rx="6" '
            f'fill="{TINT[node.colour]}" stroke="{ink}" stroke-opacity=".4"/>'
            f'<rect x="{r.x:.1f}" y="{r.y:.1f}" width="4" height="{r.h:.1f}" rx="2" fill="{ink}"/>'
        )
        found.append(_text(r.x + 12, r.y + 16, node.op, r.w - 56, INK, 'font-weight="bold"'))
        found.append(_text(r.x + r.w - 8, r.y + 16, node.dtype, 44, ink, 'text-anchor="end" font-size="10" font-weight="bold"'))
        found.append(_text(r.x + 12, r.y + 31, shape_of(node), r.w - 20, SOFT, 'font-size="10"') + "</g>")
    return found


def _closed(drawing: Drawing, number: int, placed: Placed) -> list[str]:
    """Return the SVG of a closed module: its name, its number of ops, and a bar that shows the share of ops in the low format."""
    r, box = placed.rects[number], drawing.nest.box(number)
    inside = [node for op, node in enumerate(drawing.nodes) if number in drawing.nest.path_of(op) and node.role == "op"]
    low = sum(node.colour is Colour.LOW for node in inside)
    bar, share = r.w - 24, low / max(len(inside), 1)
    y = r.y + r.h - 12
    return [
        f'<rect {_frame(r)} rx="9" fill="#fff" stroke="#9aa6b6"/>',
        _text(r.x + 12, r.y + 19, box.label or "model", r.w - 76, INK, 'font-weight="bold"'),
        _text(r.x + r.w - 12, r.y + 19, f"{len(inside)} op{'s' * (len(inside) != 1)}", 60, SOFT, 'text-anchor="end" font-size="10"'),
        f'<rect x="{r.x + 12:.1f}" y="{y:.1f}" width="{bar:.1f}" height="4" rx="2" fill="{HIGH}"/>',
        f'<rect x="{r.x + 12:.1f}" y="{y:.1f}" width="{bar * share:.1f}" height="4" rx="2" fill="{LOW}"/>',
    ]


def _bundles(drawing: Drawing, placed: Placed) -> dict[tuple[int, int], list[int]]:
    """Group edges by the visible op or box at each end: {(source id, target id): edge indices}. Edges inside a closed box are left out."""
    found: dict[tuple[int, int], list[int]] = {}
    for index, edge in enumerate(drawing.edges):
        ends = _seen(drawing, placed, edge.source), _seen(drawing, placed, edge.target)
        if ends[0] != ends[1]:
            found.setdefault(ends, []).append(index)
    return found


def _lines(drawing: Drawing, placed: Placed) -> list[str]:
    found = []
    for (a, b), members in _bundles(drawing, placed).items():
        colours = {drawing.colour(drawing.edges[index]) for index in members}
        ink = INK_OF[colours.pop()] if len(colours) == 1 else SOFT
        points = _route(drawing, placed, a, b)
        path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
        for (x0, y0, _), (x1, y1, gutter) in pairwise(points):
            if y1 < y0:  # the next point is higher up, in the next column: draw a line up in the gap between the columns
                path += f"V{y0 + 12:.1f}H{gutter:.1f}V{y1 - 13:.1f}H{x1:.1f}V{y1:.1f}"
                continue
            bend = min((y1 - y0) * 0.55, 50) if y1 > y0 else 50
            path += f"C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}"
        x, y, _ = points[-1]
        found.append(f'<path d="{path}" fill="none" stroke="{ink}" stroke-width="1.3" stroke-linejoin="round"/>')
        found.append(f'<path d="M{x:.1f} {y:.1f}l-3.2-6h6.4z" fill="{ink}"/>')
    return found


def _route(drawing: Drawing, placed: Placed, a: int, b: int) -> list[tuple[float, float, float]]:
    """Return the points (x, y, gutter) of an edge from the visible op or box `a` to `b`, both given by id.

    The edge runs out of the boxes around `a`, and into the boxes around `b`. Each layer between the two reserves space for the edge. The
    layers of a tall box are drawn in several columns. To reach the next column, an edge runs up in the gap between the two columns.
    `gutter` is the x of the gap on the left of the point's column.
    """
    nest = drawing.nest
    way, other = _outwards(drawing, a), _outwards(drawing, b)
    meet = next(number for number in other if number in way)
    source, target = way[way.index(meet) - 1], other[other.index(meet) - 1]
    ra, rb = placed.rects[a], placed.rects[b]
    points = [(ra.x + ra.w / 2, ra.y + ra.h, 0.0)]
    if source != a:
        points.append((ra.x + ra.w / 2, placed.rects[source].y + placed.rects[source].h, 0.0))
    chain = next((c for c in nest.box(meet).chains if c[0] == source and c[-1] == target), [])
    points += [(*placed.passes[meet, item], placed.gutters[meet, item]) for item in chain[1:-1]]
    gutter = placed.gutters[meet, target]
    if target != b:
        points.append((rb.x + rb.w / 2, placed.rects[target].y, gutter))
    return [*points, (rb.x + rb.w / 2, rb.y, gutter)]


def _outwards(drawing: Drawing, number: int) -> list[int]:
    if number < drawing.nest.count:
        return drawing.nest.path_of(number)
    way = [number]
    while (parent := drawing.nest.box(way[-1]).parent) >= 0:
        way.append(parent)
    return way


def _casts(drawing: Drawing, placed: Placed) -> list[str]:
    """Return the SVG of all cast marks. Each pair of visible ops or boxes with casts between them has one mark, which lists the formats."""
    found = []
    for (_, b), members in _bundles(drawing, placed).items():
        formats = {drawing.edges[index].cast for index in members} - {""}
        if not formats:
            continue
        r = placed.rects[b]
        x, y = r.x + r.w / 2, r.y - 12
        found.append(f'<path d="M{x:.1f} {y - 5:.1f}l5 5-5 5-5-5z" fill="{CAST}" stroke="#fff"/>')
        found.append(_text(x + 8, y + 3.5, ", ".join(sorted(formats)), 60, CAST, 'font-size="9" font-weight="bold"'))
    return found


def _frame(r: Rect) -> str:
    return f'x="{r.x:.1f}" y="{r.y:.1f}" width="{r.w:.1f}" height="{r.h:.1f}"'


def _text(x: float, y: float, text: str, room: float, ink: str, style: str) -> str:
    """Return an SVG text element at (x, y) in the colour `ink`. `style` holds further SVG attributes.

    `text` is cut to the width `room`, estimated from the mean width of a letter.
    """
    most = max(int(room / 6.3), 3)
    text = printable(text)
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{ink}" {style}>{escape(text)}</text>'
