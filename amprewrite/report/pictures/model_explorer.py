"""Write node data for Google's Model Explorer, which shows each op's format and colour on its own graph of the same model.

The file format is in https://github.com/google-ai-edge/model-explorer/wiki/6.-Develop-Custom-Node-Data: a JSON object with `results` by
node id. Values are words such as "bf16", so that a module shows how many of its ops run in each format. Model Explorer finds nodes by id
or by the name of an output tensor. The node names of a plan match an ONNX file, and an exported program with the same order of ops.
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
    """Write node data for Model Explorer's graph called `graph`, and return the path. Raises EmitError if `path` cannot be written."""
    return write_text(path, json.dumps(node_data(plan, graph), indent=1))


def node_data(plan: ModelPlan, graph: str = "main") -> dict[str, Any]:
    """Return the node data as values for JSON: {graph: {"results": {node: {"value": dtype, "bgColor": colour}}, …}}."""
    results: dict[str, Any] = {}
    for node in plan.nodes:
        if node.role == "op" and node.colour is not Colour.PLAIN:
            low = node.colour is Colour.LOW
            results[node.name.rpartition("/")[2]] = {"value": node.dtype, "bgColor": LOW if low else HIGH}
    return {graph: {"results": results, "showExpandedSummaryOnGroupNode": True, "showLabelCountColumnsInChildrenStatsTable": True}}
