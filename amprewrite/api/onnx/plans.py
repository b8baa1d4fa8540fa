"""Apply given plans to an ONNX graph.

1. A plan of an ONNX file has the file's node names. It must fit node by node, and is followed exactly.
2. A plan of a PyTorch model has node names of another graph. torch's exporter records on each ONNX node its module path and ATen op. The
   n-th node of an op in a module of the plan is matched with the n-th node of that op and module in the file. If their numbers differ,
   the colour is carried over only if all nodes of that op and module in the plan have the same colour.
3. The colour high (fp32) is always carried over. The colour low is not carried over to an op on the denylist, on no op list, or forced to
   fp32. If the user chose low for the node, the denylist does not prevent it, and neither does a constant that the low format cannot hold.
"""

from __future__ import annotations

import re
from dataclasses import replace

import onnx_ir as ir

from amprewrite.graphs.onnx.read.reader import OnnxReading, scopes
from amprewrite.ir.follow_plan import match_region
from amprewrite.ir.pass_base import Problem
from amprewrite.ir.plans.plan import ModelPlan, NodePlan, RegionPlan
from amprewrite.tables.errors import PlanError
from amprewrite.tables.ops.op_lists import find_op
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

REGION = "onnx"
"""Name of the only region (plan of one graph) in the plan of an ONNX file."""
CHOSEN = (Reason.ASKED, Reason.IN_PLAN)
"""Reasons that mark a node's colour (format) as the user's own choice for this node."""
SOFT = (Reason.CONSTANT, Reason.CANCELS)
"""Reasons to keep an op in fp32 that a given plan of the same graph may overrule, since the author of that plan has seen them."""


def given_region(plan: ModelPlan, problem: Problem) -> RegionPlan:
    """Return the region of `plan` (its entry for one graph) that fits the graph of `problem`.

    Raises PlanError if no region fits, or if the region makes an op low that must stay fp32.
    """
    region = match_region(plan, problem)
    for planned in region.nodes:
        vertex = problem.graph.nodes.get(planned.name)
        if vertex is None or vertex.pinned is None or planned.colour is not Colour.LOW:
            continue
        colour, reason, detail = vertex.pinned
        if colour is Colour.HIGH and reason not in SOFT:
            why = f"{reason.value} ({detail})" if detail else reason.value
            raise PlanError(f"{planned.name} is low in the plan, but cannot be: {why}; colour it high")
    return region


def carry_over(plan: ModelPlan, reading: OnnxReading, only_chosen: bool) -> str:
    """Give each op of an ONNX graph the colour (low, or high: fp32) of the same op in a PyTorch plan. Return a note on the number of ops.

    If `only_chosen` is True, give a colour only to ops for which the user gave a node override.
    """
    planned: dict[tuple[str, str], list[NodePlan]] = {}
    for node in plan.nodes:
        if node.role == "op" and node.colour is not Colour.PLAIN:
            planned.setdefault((node.module, base_name(node.op)), []).append(node)
    made: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, made_of in reading.nodes.items():
        origin = _origin(made_of)
        if origin is not None and reading.graph[name].carries_fp32:
            module, op, fx_name = origin
            made.setdefault((module, op), {}).setdefault(fx_name, []).append(name)
    followed, missed = 0, []
    for key, nodes in planned.items():
        groups = list(made.get(key, {}).values())
        alike = len({node.colour for node in nodes}) == 1
        if len(groups) != len(nodes):
            groups = [[name for group in groups for name in group]] if alike and groups else []
        if not groups:
            missed += [node.name for node in nodes if _counts(node, only_chosen)]
            continue
        for node, names in zip(nodes, groups, strict=False):
            if _counts(node, only_chosen):
                followed += sum(_pin(reading, name, node) for name in names)
    more = f" and {len(missed) - 4} more" if len(missed) > 4 else ""
    left = f"; {', '.join(missed[:4])}{more} have no op of their own there, so lists decide" if missed else ""
    return f"the plan of the PyTorch graph decides {followed} ops of the file{left}"


def keep_out(ops: frozenset[str], reading: OnnxReading) -> list[str]:
    """Keep in fp32 the ops that may be in code where the model disables torch.autocast. Return a list with a note on their number, or [].

    `ops` has the ATen names of the ops that the model runs, or may run, in such code; if it is empty, nothing is done. A file shows that an
    op ran under a context manager, but not which: disabled autocast, enabled autocast or torch.no_grad. An op under a context manager is
    kept in fp32 if `ops` has its name, or if it is not on the allowlist (of matmuls and the like). Ops with a fixed format do not change.
    """
    kept = 0
    for name, node in reading.nodes.items() if ops else ():
        vertex, origin = reading.graph[name], _origin(node)
        if not vertex.carries_fp32 or vertex.pinned is not None or not _in_region(node):
            continue
        if vertex.kind is not OpKind.ALLOW or (origin is not None and origin[1] in ops):
            reading.graph.nodes[name] = replace(vertex, pinned=(Colour.HIGH, Reason.INSIDE_AUTOCAST, "enabled=False"))
            kept += 1
    return [f"nodes that stay fp32, as the model disables torch.autocast there, or may: {kept}"] if kept else []


def region_ops(model: ir.Model) -> frozenset[str]:
    """Return the ATen base names of all ops in `model` whose PyTorch code ran under a context manager such as torch.no_grad."""
    origins = (_origin(node) for node in model.graph.all_nodes() if _in_region(node))
    return frozenset(origin[1] for origin in origins if origin is not None)


def _in_region(node: ir.Node) -> bool:
    """True if the node's PyTorch code ran under a context manager that torch's exporter captures as a subgraph: torch.autocast or no_grad.

    The exporter runs such a subgraph as generated code, and the node's stack trace names this code.
    """
    return node.metadata_props.get("pkg.torch.onnx.stack_trace", "").startswith('File "<eval_with_key>')


def _counts(node: NodePlan, only_chosen: bool) -> bool:
    return not only_chosen or (node.reason is Reason.ASKED and node.detail.startswith("node:"))


def _pin(reading: OnnxReading, name: str, planned: NodePlan) -> bool:
    vertex, chosen = reading.graph[name], planned.reason in CHOSEN
    if planned.colour is Colour.LOW:
        if vertex.pinned is not None and not (chosen and vertex.pinned[1] is Reason.CONSTANT):
            return False
        if vertex.kind is None or (vertex.kind is OpKind.DENY and not chosen):
            return False
    low = planned.colour is Colour.LOW
    # `chosen` is True if the user chose the colour, by an override or an edit of the plan. A chosen low op gets the reason ASKED, so that
    # later passes keep it low and note the risk.
    reason = Reason.ASKED if planned.reason is Reason.ASKED or (chosen and low) else Reason.IN_PLAN
    pinned = (planned.colour, reason, f"{planned.name} of the PyTorch graph")
    reading.graph.nodes[name] = replace(vertex, pinned=pinned)
    return True


def base_name(op: str) -> str:
    """Return the ATen base name of an op, such as "softmax" for "_softmax"; `op` itself if the op table lacks it."""
    row = find_op(op)
    return row.name if row is not None else op


def _origin(node: ir.Node) -> tuple[str, str, str] | None:
    """Return the module path, ATen base name and FX name that torch's exporter recorded on a node; None if they are missing."""
    module, name = scopes(node)
    target = re.search(r"target=torch\.ops\.\w+\.(\w+)", node.metadata_props.get("pkg.torch.onnx.fx_node", ""))
    return (module, base_name(target[1]), name) if name and target is not None else None
