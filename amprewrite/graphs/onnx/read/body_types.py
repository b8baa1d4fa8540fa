"""Infer the types of values in subgraphs of If, Loop and Scan, which files need not declare.

The schemas of ONNX ops give the type of a result by the types of its operands. Ops of other domains may have no schema, and such an op
may make a value that enters or leaves a subgraph. But the element type is the same outside and inside the subgraph, in both branches of an
If, and in all iterations of a loop. So if one of these types is known, the others get it.

This file has special code for `If`, `Loop` and `Scan`.
"""

from __future__ import annotations

import onnx_ir as ir

from amprewrite.graphs.onnx.ops import bodies, fill_types, guess
from amprewrite.tables.ops.onnx_names import FLOW


def fill_graph_types(graph: ir.Graph, opset: int) -> None:
    """Infer the missing types of the results of all nodes of a graph, and of the values in its subgraphs."""
    for node in graph:
        borders = _borders(node) if node.op_type in FLOW and not node.domain and not (node.op_type == "Scan" and opset < 9) else []
        _share(borders)
        for body in bodies(node):
            fill_graph_types(body, opset)
        _share(borders)
        if not borders:
            fill_types(node, opset)


def _borders(node: ir.Node) -> list[list[ir.Value | None]]:
    """Return lists of values that share their type: a result or operand of an If, Loop or Scan, and its counterparts in the subgraphs."""
    # Skip the first two inputs of a Loop (trip count and condition), and the first output of its body (a condition).
    taken, given = (2, 1) if node.op_type == "Loop" else (0, 0)
    inner = bodies(node)
    found: list[list[ir.Value | None]] = [
        [value, *(body.outputs[index + given] for body in inner)] for index, value in enumerate(node.outputs)
    ]
    if node.op_type == "If":
        return found
    states = len(node.inputs) - (taken or node.attributes["num_scan_inputs"].as_int())
    for index, entering in enumerate(zip(node.inputs[taken:], inner[0].inputs[taken:], strict=False)):
        if index < min(states, len(node.outputs)):
            found[index] += entering
        else:
            found.append(list(entering))
    return found


def _share(borders: list[list[ir.Value | None]]) -> None:
    """Give the values of unknown type in each list the tensor type of another value in the same list."""
    for values in borders:
        kind = next((each.type for each in values if each is not None and isinstance(each.type, ir.TensorType)), None)
        for value in values:
            if value is not None and value.type is None and kind is not None:
                guess(value, kind)
