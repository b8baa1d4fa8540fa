"""Node data for Google's Model Explorer: colours and reasons as overlays over a graph that it shows.

Format: https://github.com/google-ai-edge/model-explorer/wiki/6.-Develop-Custom-Node-Data: a JSON object with `results` by node
id. A value is a word, so modules show how many of their ops run in which format. Nodes are found by id or by the name of an
output tensor: the names of a plan are those of an ONNX file's nodes, and of an exported program's where its order is ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from amprewrite.ir.plans.plan import ModelPlan
from amprewrite.tables.boundary.files import write_text
from amprewrite.tables.vocabulary import Colour

LOW, HIGH = "#bfe8e2", "#f8d8a8"


def to_model_explorer(plan: ModelPlan, path: Any, graph: str = "main") -> Path:
    """Write node data for the graph called `graph` there. EmitError if `path` cannot be written."""
    return write_text(path, json.dumps(node_data(plan, graph), indent=1))


def node_data(plan: ModelPlan, graph: str = "main") -> dict[str, Any]:
    """Node data for the graph called `graph` as plain data, by graph name."""
    results: dict[str, Any] = {}
    for node in plan.nodes:
        if node.role == "op" and node.colour is not Colour.PLAIN:
            low = node.colour is Colour.LOW
            results[node.name.rpartition("/")[2]] = {"value": node.dtype, "bgColor": LOW if low else HIGH}
    return {graph: {"results": results, "showExpandedSummaryOnGroupNode": True, "showLabelCountColumnsInChildrenStatsTable": True}}
