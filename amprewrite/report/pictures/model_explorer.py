"""Write node data for Google's Model Explorer: formats and colours, shown on its graph of the same model.

Format: https://github.com/google-ai-edge/model-explorer/wiki/6.-Develop-Custom-Node-Data: a JSON object with `results` by node
id. A value is a word, so modules show how many of their ops run in each format. Model Explorer finds nodes by id or by the name of an
output tensor. A plan has the node names of an ONNX file, and of an exported program if its order of ops is the same.
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
    """Write node data for Model Explorer's graph called `graph`. Raises EmitError if `path` cannot be written."""
    return write_text(path, json.dumps(node_data(plan, graph), indent=1))


def node_data(plan: ModelPlan, graph: str = "main") -> dict[str, Any]:
    """The node data as plain data, under the graph's name."""
    results: dict[str, Any] = {}
    for node in plan.nodes:
        if node.role == "op" and node.colour is not Colour.PLAIN:
            low = node.colour is Colour.LOW
            results[node.name.rpartition("/")[2]] = {"value": node.dtype, "bgColor": LOW if low else HIGH}
    return {graph: {"results": results, "showExpandedSummaryOnGroupNode": True, "showLabelCountColumnsInChildrenStatsTable": True}}
