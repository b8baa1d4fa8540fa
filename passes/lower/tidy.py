"""Remove what the rewrite left without effect: conversions to the dtype a value already has, and copies that nothing reads.

Only nodes that carry no side effect and that capture or we put there for a dtype's sake are touched. A low copy of a high
copy of a low value is folded (it gives back the same bits); a high copy of a low copy of a high value never is.
"""

from __future__ import annotations

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.graphs.fx.node_facts import CONVERSIONS, example_value, tensors
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.passes.apply.insert_casts import CAST
from amprewrite.tables.ops.op_lists import op_name


class Tidy(Pass[RegionPlan, EditedGraph]):
    name = "tidy"

    def call(self, plan: RegionPlan, edited: EditedGraph) -> bool:
        removed = remove_idle_conversions(edited.module.graph)
        edited.module.recompile()
        return removed > 0


def remove_idle_conversions(graph: torch.fx.Graph) -> int:
    """Drop `x.to(dtype)` if x has that dtype already; number of nodes removed. Needs example values."""
    removed = 0
    for node in list(graph.nodes):
        if node.op == "call_method" and op_name(node.target) in CONVERSIONS and _is_idle(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            removed += 1
        elif CAST in node.meta and not node.users:
            graph.erase_node(node)
            removed += 1
    return removed


def _is_idle(node: torch.fx.Node) -> bool:
    """Whether a conversion only asks for a dtype that is there already: PyTorch would hand back the same tensor."""
    source = node.args[0]
    if node.kwargs or len(node.args) != 2 or not isinstance(node.args[1], torch.dtype) or not isinstance(source, torch.fx.Node):
        return False
    found = tensors(example_value(source))
    return len(found) == 1 and found[0].dtype == node.args[1]
