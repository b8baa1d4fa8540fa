"""Collect the graph that all pictures of a plan show, and lay it out. Modules are nested boxes. Each box arranges its parts in layers.

The graph has ops with fp32 or low values, inputs, outputs, and edges with their casts.

Inside every module (Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical system structures", 1981):

1. The parts of the module (ops and inner modules) are put in the order in which they first run. An edge between two ops counts as an
   edge between the parts that hold the ops.
2. Each part is one layer below the lowest part that it reads. A part that reads nothing moves down to the layer above its highest reader.
3. An edge that passes several layers gets a place in each of them, so that it is drawn around the parts there.
4. Each layer is sorted by the mean position of the neighbours of its parts. This is repeated a few times, downwards and upwards.

Layers do not change if a reader of the HTML report opens or closes a module; only sizes do. `place` turns layers into coordinates for a
static picture; in the HTML report, a script does so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from amprewrite.ir.plans.plan import ModelPlan, NodePlan
from amprewrite.report.counts import by_region
from amprewrite.tables.vocabulary import Colour

SWEEPS = 6
"""Number of passes over all layers, alternately downwards and upwards, that improve the order and the positions of parts."""
LONGEST_ROUTE = 60
"""An edge that passes more than LONGEST_ROUTE layers gets no places in them, and is drawn as a straight line."""


@dataclass
class Box:
    """A module that is drawn as a box around its parts."""

    id: int
    path: str
    """Path of the module; "" for the root."""
    label: str
    """Title: the last name in the path, or several names if the outer module has no box."""
    parent: int
    """Id of the enclosing box, -1 for the root."""
    parts: list[int] = field(default_factory=list)
    """Ids of the ops and boxes directly inside, in the order of their first runs. The id of an op is its index in the list of nodes."""
    layers: list[list[int]] = field(default_factory=list)
    """Layers from top to bottom, each a list of ids from left to right. A negative id is a place for an edge that passes the layer."""
    chains: list[list[int]] = field(default_factory=list)
    """Edges between parts, each as a list of ids: its source, its places in the layers that it passes, its target."""


@dataclass
class Nest:
    """The modules of a picture as boxes nested in each other, with the ops as the innermost parts."""

    count: int
    """Number of ops. Ids below this number are ops; ids from this number on are boxes."""
    boxes: list[Box]
    """All boxes, the root first."""
    parent: list[int]
    """Id of the innermost box around each op, by the op's id."""

    def box(self, number: int) -> Box:
        return self.boxes[number - self.count]

    def path_of(self, op: int) -> list[int]:
        """Return the ids of an op and of all boxes around it, from the op outwards to the root box."""
        path, here = [op], self.parent[op]
        while here >= 0:
            path.append(here)
            here = self.box(here).parent
        return path


def nest(paths: list[tuple[str, ...]], edges: Iterable[tuple[int, int]]) -> Nest:
    """Group ops, given in the order in which they run, into nested boxes of modules, and arrange the parts of each box in layers.

    `paths` has the module path of each op. `edges` has pairs (op that makes a value, op that reads it). A module with a single part gets no
    box: its part is put in the enclosing box.
    """
    tree = _tree(paths)
    found = Nest(len(paths), [], [-1] * len(paths))
    _collect(found, tree, -1, "", "")
    inner: dict[int, set[tuple[int, int]]] = {}
    ways = [found.path_of(op) for op in range(len(paths))]
    for source, target in edges:
        where, a, b = _meeting(ways[source], ways[target])
        inner.setdefault(where, set()).add((a, b))
    for box in found.boxes:
        _arrange(box, inner.get(box.id, set()))
    return found


# -- 1. nesting -------------------------------------------------------------------------
@dataclass
class _Branch:
    parts: dict[str, _Branch | int] = field(default_factory=dict)


def _tree(paths: list[tuple[str, ...]]) -> _Branch:
    root = _Branch()
    for op, path in enumerate(paths):
        here = root
        for part in path:
            there = here.parts.setdefault(part, _Branch())
            assert isinstance(there, _Branch)
            here = there
        here.parts[f"\0{op}"] = op
    return root


def _collect(found: Nest, branch: _Branch, parent: int, path: str, label: str) -> int:
    """Add the box of a module (`branch`), and of all modules inside it, to `found`. Return the id of the module's box.

    `parent` is the id of the enclosing box, -1 for the root. `path` and `label` are stored in the module's box. If a module other than the
    root has a single part, it gets no box, and the id of this part is returned.
    """
    if len(branch.parts) == 1 and parent >= 0:
        ((name, only),) = branch.parts.items()
        if isinstance(only, int):
            found.parent[only] = parent
            return only
        return _collect(found, only, parent, f"{path}.{name}" if path else name, f"{label}.{name}" if label else name)
    box = Box(found.count + len(found.boxes), path, label, parent)
    found.boxes.append(box)
    for name, part in branch.parts.items():
        if isinstance(part, int):
            found.parent[part] = box.id
            box.parts.append(part)
        else:
            box.parts.append(_collect(found, part, box.id, f"{path}.{name}" if path else name, name))
    return box.id


def _meeting(way: list[int], other: list[int]) -> tuple[int, int, int]:
    """Find the innermost box around both ends of an edge. Return the ids of this box and of the two parts of it that contain the ends.

    `way` and `other` are the paths of the two ends: ids from the op outwards to the root box (`Nest.path_of`).
    """
    mine = {box: place for place, box in enumerate(way)}
    for place, box in enumerate(other):
        if box in mine:
            return box, way[mine[box] - 1], other[place - 1]
    raise AssertionError("every op is in the root box")


# -- 2. to 4. layers -------------------------------------------------------------------------
def _arrange(box: Box, edges: set[tuple[int, int]]) -> None:
    order = {part: place for place, part in enumerate(box.parts)}
    forward = sorted((edge for edge in edges if order[edge[0]] < order[edge[1]]), key=lambda e: (order[e[0]], order[e[1]]))
    into: dict[int, list[int]] = {part: [] for part in box.parts}
    out: dict[int, list[int]] = {part: [] for part in box.parts}
    for a, b in forward:
        into[b].append(a)
        out[a].append(b)
    layer: dict[int, int] = {}
    for part in box.parts:
        layer[part] = max((layer[a] + 1 for a in into[part]), default=0)
    for part in reversed(box.parts):
        if not into[part] and out[part]:
            layer[part] = min(layer[b] for b in out[part]) - 1
    box.layers = [[] for _ in range(max(layer.values(), default=0) + 1)]
    for part in box.parts:
        box.layers[layer[part]].append(part)
    _route(box, forward, layer)
    _order(box)


def _route(box: Box, edges: list[tuple[int, int]], layer: dict[int, int]) -> None:
    """Reserve space for each edge between parts of `box` in the layers that it passes. `layer` has the layer of each part.

    The space gets an id below 0, and is put in the layer like a part. An edge that passes more than LONGEST_ROUTE layers gets no space.
    Other edges are recorded in `box.chains`, each as [id of its source, ids of its spaces, id of its target].
    """
    passing = 0
    for a, b in edges:
        span = range(layer[a] + 1, layer[b])
        if len(span) > LONGEST_ROUTE:
            continue
        chain = [a]
        for level in span:
            passing -= 1
            box.layers[level].append(passing)
            chain.append(passing)
        box.chains.append([*chain, b])


def _order(box: Box) -> None:
    up: dict[int, list[int]] = {}
    down: dict[int, list[int]] = {}
    for chain in box.chains:
        for a, b in pairwise(chain):
            up.setdefault(b, []).append(a)
            down.setdefault(a, []).append(b)
    place = {item: index for layer in box.layers for index, item in enumerate(layer)}
    for sweep in range(SWEEPS):
        near, layers = (up, box.layers) if sweep % 2 == 0 else (down, box.layers[::-1])
        for layer in layers:
            if len(layer) < 2:
                continue
            want = {i: sum(place[n] for n in near[i]) / len(near[i]) if near.get(i) else float(place[i]) for i in layer}
            layer.sort(key=lambda item: (want[item], place[item]))
            place.update({item: index for index, item in enumerate(layer)})


# -- coordinates -------------------------------------------------------------------------------
@dataclass
class Rect:
    """The rectangle of a box or op: left end, top, width and height, in units of the picture."""

    x: float
    y: float
    w: float
    h: float


GAP, PASS, ROW, PAD, HEAD, GUTTER = 18.0, 6.0, 26.0, 14.0, 24.0, 40.0
"""Space between parts, width of a place for an edge, space between layers, margin in a box, height of its title, space between columns."""
TALL, ASPECT = 1150.0, 1.5
"""Height above which the layers of a box are divided into several columns, and the ratio width / height to which the columns come close."""


@dataclass
class Placed:
    """Result of `place`: the coordinates of everything visible, for one choice of open boxes."""

    rects: dict[int, Rect]
    """Rectangle of every visible op and box."""
    passes: dict[tuple[int, int], tuple[float, float]]
    """(x, y) of the middle of each place that a layer keeps free for a passing edge, by (id of the box, id of the place)."""
    open: set[int]
    """Ids of the open boxes."""
    gutters: dict[tuple[int, int], float] = field(default_factory=dict)
    """By (id of a box, id of a part or place): x of the gap on the left of its column. Edges from the previous column go up in this gap."""


def place(found: Nest, size_of: dict[int, tuple[float, float]], opened: set[int]) -> Placed:
    """Return the coordinates of everything visible in the nested boxes `found`, if the boxes with an id in `opened` are open.

    `size_of` has (width, height) of each op and each closed box, by id.
    """
    sizes: dict[int, tuple[float, float]] = dict(size_of)
    spots: dict[int, dict[int, tuple[float, float, float]]] = {}

    def measure(number: int) -> tuple[float, float]:
        if number < found.count or number not in opened:
            return sizes[number]
        box = found.box(number)
        extent = {part: measure(part) for part in box.parts}
        spots[number], sizes[number] = _spread(box, extent)
        return sizes[number]

    placed = Placed({}, {}, opened)

    def settle(number: int, x: float, y: float) -> None:
        placed.rects[number] = Rect(x, y, *sizes[number])
        if number < found.count or number not in opened:
            return
        for item, (left, top, gutter) in spots[number].items():
            placed.gutters[number, item] = x + gutter
            if item < 0:
                placed.passes[number, item] = x + left, y + top
            else:
                settle(item, x + left, y + top)

    measure(found.count)
    settle(found.count, 0, 0)
    return placed


def _spread(box: Box, extent: dict[int, tuple[float, float]]) -> tuple[dict[int, tuple[float, float, float]], tuple[float, float]]:
    """Lay out the inside of an open box. Return ({id of a part or passing edge: (x, y, gutter)}, (width, height) of the box).

    (x, y) is the upper left corner of a part, or the middle of the space for a passing edge. Layers of a tall box are divided into columns.
    The gutter is the x of the gap on the left of the column, in which edges from the previous column run up. `extent` has (width, height)
    of each part, by id.
    """
    if not box.parts:
        return {}, (8 * PAD, HEAD + 2 * PAD)
    middle: dict[int, float] = {}
    near: dict[int, list[int]] = {}
    for chain in box.chains:
        for a, b in pairwise(chain):
            near.setdefault(a, []).append(b)
            near.setdefault(b, []).append(a)
    width = {item: extent[item][0] if item >= 0 else PASS for layer in box.layers for item in layer}
    for layer in box.layers:
        total = sum(width[item] for item in layer) + GAP * (len(layer) - 1)
        left = -total / 2
        for item in layer:
            middle[item] = left + width[item] / 2
            left += width[item] + GAP
    for sweep in range(SWEEPS):
        for layer in box.layers if sweep % 2 == 0 else box.layers[::-1]:
            want = [sum(middle[n] for n in near[i]) / len(near[i]) if near.get(i) else middle[i] for i in layer]
            for item, x in zip(layer, _apart(layer, want, width), strict=True):
                middle[item] = x
    heights = [max((extent[item][1] for item in layer if item >= 0), default=0) + ROW for layer in box.layers]
    spots: dict[int, tuple[float, float, float]] = {}
    left, deepest = PAD, 0.0
    for column in _columns(heights, _extent([i for layer in box.layers for i in layer], middle, width)):
        items = [item for place in column for item in box.layers[place]]
        low = min(middle[i] - width[i] / 2 for i in items)
        top = HEAD + PAD
        for place in column:
            for item in box.layers[place]:
                x, height = middle[item] - low + left, heights[place] - ROW
                corner = (x, top + height / 2) if item < 0 else (x - width[item] / 2, top + (height - extent[item][1]) / 2)
                spots[item] = (*corner, left - GUTTER / 2)
            top += heights[place]
        deepest = max(deepest, top - ROW)
        left += _extent(items, middle, width) + GUTTER
    return spots, (left - GUTTER + PAD, deepest + PAD)


def _extent(items: list[int], middle: dict[int, float], width: dict[int, float]) -> float:
    return max(middle[i] + width[i] / 2 for i in items) - min(middle[i] - width[i] / 2 for i in items)


def _columns(heights: list[float], broad: float) -> list[range]:
    """Divide layers, given by their heights, into columns of width `broad`. Return the range of layer indices of each column.

    If the heights sum up to at most TALL, there is one column. Otherwise the number of columns makes width / height come close to ASPECT.
    """
    tall = sum(heights)
    count = 1
    if tall > TALL:
        count = max(1, min(round(math.sqrt(ASPECT * tall / (broad + GUTTER))), int(tall / max(heights))))
    columns, first, done = [], 0, 0.0
    for column in range(count):
        last = first
        while last < len(heights) and (column == count - 1 or last == first or done + heights[last] / 2 <= tall * (column + 1) / count):
            done += heights[last]
            last += 1
        if last > first:
            columns.append(range(first, last))
        first = last
    return columns


def _apart(layer: list[int], want: list[float], width: dict[int, float]) -> list[float]:
    """Return the x of the middle of each item in a layer, close to the wanted x in `want`. Items are moved apart so that none overlap.

    The result is the mean of two layouts, in which items move only to the right or only to the left. `width` has their widths, by id.
    """
    from_left, right = [], float("-inf")
    for item, x in zip(layer, want, strict=True):
        right = max(x - width[item] / 2, right) + width[item] + GAP
        from_left.append(right - GAP - width[item] / 2)
    from_right, left = [0.0] * len(layer), float("inf")
    for index in range(len(layer) - 1, -1, -1):
        left = min(want[index] + width[layer[index]] / 2, left) - width[layer[index]] - GAP
        from_right[index] = left + GAP + width[layer[index]] / 2
    return [(a + b) / 2 for a, b in zip(from_left, from_right, strict=True)]


@dataclass(frozen=True)
class Edge:
    """An edge from the op that makes a value to an op that reads it."""

    source: int
    """Index of the maker in `Drawing.nodes`."""
    target: int
    """Index of the reader in `Drawing.nodes`."""
    cast: str = ""
    """Format of the cast copy that the reader reads; "" if it reads the value itself."""


@dataclass(frozen=True)
class Drawing:
    """Result of `draw`: the nodes to draw, the edges between them, and the nested boxes of modules."""

    nodes: tuple[NodePlan, ...]
    edges: tuple[Edge, ...]
    nest: Nest
    hidden: int
    """Number of ops that are not drawn because they have no fp32 value. Weights are not drawn either, but not counted here."""

    def colour(self, edge: Edge) -> Colour:
        """Return the colour of the op that makes the edge's value."""
        return self.nodes[edge.source].colour


def draw(plan: ModelPlan) -> Drawing:
    """Return the nodes, edges and nested boxes to draw for the whole plan. If the plan covers several graphs, each graph has a box."""
    nodes: list[NodePlan] = []
    paths: list[tuple[str, ...]] = []
    edges: list[Edge] = []
    hidden = 0
    several = len(plan.regions) > 1
    for region, (named, casts) in zip(plan.regions, by_region(plan), strict=True):
        read = {value for node in region.nodes for value in node.inputs}
        copies = {(cast.value, user): cast.to for cast in casts for user in cast.users}
        prefix = f"{region.name}/" if several else ""
        place: dict[str, int] = {}
        for node, bare in zip(named, region.nodes, strict=True):
            shown = (node.role == "op" and node.colour is not Colour.PLAIN) or node.role == "output"
            if not shown and not (node.role == "input" and bare.name in read and node.colour is not Colour.PLAIN):
                hidden += node.role == "op"
                continue
            place[node.name] = len(nodes)
            nodes.append(node)
            module = tuple(node.module.split(".")) if node.module and node.role == "op" else ()
            paths.append((region.name, *module) if several else module)
        for node in named:
            for value in dict.fromkeys(prefix + value for value in node.inputs):
                if node.name in place and value in place:
                    edges.append(Edge(place[value], place[node.name], copies.get((value, node.name), "")))
    return Drawing(tuple(nodes), tuple(edges), nest(paths, ((edge.source, edge.target) for edge in edges)), hidden)
