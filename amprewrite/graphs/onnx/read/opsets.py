"""Set the opset of a model: add one if none is named, raise it if it is too old, and raise it if more ops then take the low format.

1. A model that has only ops of other domains may name no opset for onnx's own ops. It gets one, because inserted casts are onnx's ops.
2. Opsets before OLDEST broadcast by attribute. onnx's version converter raises such a model to OLDEST.
3. A newer opset is chosen if it lets more ops of the model take the low format, and ONNX Runtime still loads the model.

A raised model is not trusted: its results on sample runs are compared with those of the original model. If that is not possible, the
schemas must show that no op of the model computes something else at the new opset. They must do so for all ops in bodies of If, Loop and
Scan, because a sample may run no op of a body.

This file has special code for ops that the converter raises wrongly: `PRelu`, `Resize`, `Scan`, and the `Unsqueeze` that it inserts after
constants.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx
import onnx_ir as ir

from amprewrite.graphs.log_quiet import Quiet
from amprewrite.graphs.onnx.check import invalid
from amprewrite.graphs.onnx.ops import (
    OLDEST,
    add_constant,
    bodies,
    changed_ops,
    constant_tensor,
    drop_unread_constants,
    format_of,
    means_the_same,
    op_of,
    opset_taking,
)  # fmt: skip
from amprewrite.graphs.onnx.run.onnx_runtime import is_large, refusal
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.errors import CaptureError, one_line
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.onnx_names import FLOW
from amprewrite.tables.ops.op_lists import OpLists
from amprewrite.tables.vocabulary import OpKind

CASTS = 13
"""The opset given to a model that has no ops of onnx and names no opset: the first whose Cast takes every format."""
CONVERTERS = [logging.getLogger("onnxscript.version_converter")]
"""Loggers that are silenced while an opset is raised, because they only report which converter is used."""
UNSEEN = "in a body of If, Loop or Scan that a sample may not run, to compare the two"
"""End of the messages about ops in bodies that cannot be raised."""
RESIZED = 11
"""The first opset at which attributes of Resize say which elements a result is made of."""
REMEDY = "raise it with onnx.version_converter.convert_version"
"""Advice at the end of the message about a PRelu that cannot be converted."""


def name_opset(model: ir.Model) -> int:
    """Return the opset of onnx's own ops in `model`, and store it in the model under the domain "".

    A model that names no such opset gets 1, as ONNX defines for old files. The exception is a model of IR version 3 or later that has only
    ops of other domains. It gets the newest opset of onnx's ops that its functions name. If they name none, it gets CASTS, which allows
    casts between all formats."""
    domains = model.opset_imports
    of_functions = [opset for each in model.functions.values() for domain, opset in each.opset_imports.items() if domain in ("", "ai.onnx")]
    if "" not in domains and "ai.onnx" not in domains:
        if model.ir_version >= 3 and not any(node.domain in ("", "ai.onnx") for graph in model.graphs() for node in graph):
            domains[""] = max(of_functions, default=CASTS)
            _raise_ir_version(model, domains[""])
        else:
            domains[""] = 1
    domains[""] = domains.get("", 0) or domains["ai.onnx"]
    return domains[""]


def unite_opsets(model: ir.Model) -> None:
    """Give each function of a model the model's opsets, as inlining needs. Raises CaptureError if that changes the meaning of an op."""
    for function in model.functions.values():
        for domain, opset in list(function.opset_imports.items()):
            key = "" if domain == "ai.onnx" else domain
            own = model.opset_imports.get(key, opset)
            nodes = [node for node in function.all_nodes() if node.domain == key and node.op_identifier() not in model.functions]
            changed = {node.op_type for node in nodes if opset != own and (key or not means_the_same(node.op_type, opset, own))}
            if changed:
                raise CaptureError(
                    f"the function {printable(function.name)} is of opset {opset} and the model of {own}, and {', '.join(sorted(changed))} "
                    "changed in between; inline it with onnx.inliner.inline_local_functions(model, convert_version=True)"
                )
            function.opset_imports[domain] = own


# -- models of too old an opset --------------------------------------------------------------
def raise_old(model: ir.Model) -> ir.Model:
    """Convert a model of an older opset to the opset OLDEST.

    Raises CaptureError if onnx's version converter fails, if the model is too large for it, or if an op in a subgraph may change results.
    """
    opset = model.opset_imports[""]
    said = f"the model is of opset {opset}, older than {OLDEST}"
    if is_large(model):
        raise CaptureError(f"{said}, and too large for onnx's version converter; export it again at a newer opset")
    hidden = changed_ops(model, OLDEST, in_bodies=True)
    if hidden:
        raise CaptureError(f"{said}, and {', '.join(hidden)} changed, {UNSEEN}; export it again at a newer opset")
    old = model.clone()
    _unbroadcast_slopes(old, said)
    proto = ir.to_proto(old)
    problem = invalid(proto, full=False)  # check the model first, because onnx's converter may crash on a malformed model
    if problem:
        raise CaptureError(f"{said}, and not valid ONNX: {problem}; export it again")
    try:
        made = ir.from_proto(onnx.version_converter.convert_version(proto, OLDEST))
    except Exception as error:
        raise CaptureError(f"{said}, and cannot be raised: {one_line(error)}; export it again at a newer opset") from error
    _raise_ir_version(made, OLDEST)
    _fold_unsqueezes(made)
    return made


def _fold_unsqueezes(model: ir.Model) -> None:
    """Replace each Unsqueeze of a constant (the converter inserts some) by a reshaped constant, so that ops read a constant directly."""
    for graph in model.graphs():
        for node in list(graph):
            value, result = node.inputs[0] if node.inputs else None, node.outputs[0]
            if result.type is None:
                result.shape = None  # onnx_ir cannot write a value that has a shape but no type
            tensor = constant_tensor(value) if value is not None else None
            if node.op_type != "Unsqueeze" or tensor is None or result.is_graph_output():
                continue
            held = tensor.numpy()
            for axis in sorted(node.attributes["axes"].as_ints()):
                held = np.expand_dims(held, axis)
            result.replace_all_uses_with(add_constant(graph, f"{result.name}_held", held))
            graph.remove(node, safe=True)
        drop_unread_constants(graph)


def _unbroadcast_slopes(model: ir.Model, said: str) -> None:
    """Give slopes of PRelu the shape that the opset OLDEST needs, because the converter leaves their shape unchanged.

    Before OLDEST, slopes of shape [channels] belong to dim 1 of the input. OLDEST broadcasts shapes from the right, so the slopes need dims
    of size one after the channels. Raises CaptureError, with a message that begins with `said`, if the rank of an input is unknown.
    """
    for graph in model.graphs():
        for node in list(graph):
            slope = node.inputs[1] if node.op_type == "PRelu" and len(node.inputs) > 1 else None
            if slope is None or (slope.shape is not None and (len(slope.shape) != 1 or list(slope.shape) == [1])):
                continue
            data = node.inputs[0]
            if data is None or data.shape is None:
                raise CaptureError(f"{said}; {printable(slope.name)} cannot be shaped for PRelu, whose input has no known rank; {REMEDY}")
            if len(data.shape) > 2:
                _unsqueeze(graph, node, slope, list(range(1, len(data.shape) - 1)))


def _unsqueeze(graph: ir.Graph, node: ir.Node, slope: ir.Value, axes: list[int]) -> None:
    """Insert dims of size one at `axes`, after the dim of the channels, into the slope that the PRelu `node` reads."""
    tensor, name = constant_tensor(slope), f"{slope.name}_of_{node.outputs[0].name}"
    if tensor is not None:
        shaped = add_constant(graph, name, tensor.numpy().reshape(-1, *(1 for _ in axes)))
    else:
        made = ir.node("Unsqueeze", [slope], {"axes": axes})
        graph.insert_before(node, [made])
        shaped = made.outputs[0]
        shaped.name, shaped.type = name, slope.type
    node.replace_input_with(1, shaped)


# -- a newer opset for the low format ---------------------------------------------------------
def raise_for_format(model: ir.Model, low: Format, lists: OpLists, least: int = 0) -> tuple[ir.Model, list[str]]:
    """Raise the opset of a model until its ops may return the type `low`, such as bf16. Return (model, notes on the change).

    The new opset is the lowest that suffices, but at least `least`, and never lower than before. Two sorts of ops are ignored: ops that
    `lists` keep in fp32, and ops that can return `low` at no opset. If raising is impossible, return the model unchanged, with a note.
    """
    opset = model.opset_imports[""]
    nodes = [node for graph in model.graphs() for node in graph if not node.domain]
    wanted = {node.op_type for node in nodes if _wants_low(node, lists)}
    needed = max(opset, least, *(opset_taking(op_type, opset, low) for op_type in wanted))
    if needed == opset:
        return model, []
    kept = f"opset {opset} could not be raised to {needed} for {low.name}"
    changed = changed_ops(model, needed)
    if changed and refusal(model):
        return model, [f"{kept}: {', '.join(changed)} changed in between, and ONNX Runtime does not load the file, to compare the two"]
    hidden = changed_ops(model, needed, in_bodies=True)
    if hidden:
        return model, [f"{kept}: {', '.join(hidden)} changed in between, {UNSEEN}"]
    if opset < 9 and any(node.op_type == "Scan" for node in nodes):
        return model, [f"{kept}: a Scan of opset 8 has a batch, and no later one has"]
    from onnxscript import version_converter

    raised = model.clone()
    try:
        with Quiet(*CONVERTERS):
            version_converter.convert_version(raised, needed, fallback=True)
    except Exception as error:
        return model, [f"{kept}: {one_line(error)}"]
    if raised.opset_imports[""] != needed:
        return model, [f"{kept}: the converter has no way"]
    _raise_ir_version(raised, needed)
    if opset < RESIZED <= needed:
        _keep_asymmetric(raised)
    refused = refusal(raised)
    if refused and not refusal(model):  # the installed ONNX Runtime has no kernels for some ops of the newer opset
        return model, [f"{kept}: ONNX Runtime does not load it then ({refused})"]
    why = "which fp8 products need" if needed == least else f"at which more of its ops take {low.name}"
    return raised, [f"opset raised from {opset} to {needed}, {why}"]


def _keep_asymmetric(model: ir.Model) -> None:
    """Set attributes of each Resize, so that it reads the same elements as before its opset was raised. The new defaults differ.

    Below the opset RESIZED, element i of a result is read at i / scale ("asymmetric"). In the mode "nearest", ONNX Runtime rounds this
    position down ("floor"), or up ("ceil") where it shrinks a dim. One attribute rounds all dims: it is "ceil" if no scale is above one.
    """
    for node in (node for graph in model.graphs() for node in graph if node.op_type == "Resize" and not node.domain):
        node.attributes["coordinate_transformation_mode"] = ir.AttrString("coordinate_transformation_mode", "asymmetric")
        if node.attributes.get_string("mode", "nearest") == "nearest":
            scales = constant_tensor(node.inputs[2]) if node.inputs[2] is not None else None
            shrinks = scales is not None and bool((scales.numpy() <= 1).all())
            node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", "ceil" if shrinks else "floor")


def _raise_ir_version(model: ir.Model, opset: int) -> None:
    model.ir_version = max(model.ir_version, onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)]))


def _wants_low(node: ir.Node, lists: OpLists) -> bool:
    """True if `node` has an fp32 result and the op lists let it run low. For an If, Loop or Scan: True if fp32 values enter or leave it."""
    if node.op_type in FLOW:  # If, Loop and Scan are on no list, but fp32 values that enter or leave their subgraphs may become low
        crossing = (value for body in bodies(node) for value in (*body.inputs, *body.outputs))
        return any(format_of(value) == "fp32" for value in (*node.outputs, *crossing))
    kind = lists.kind(op_of(node))
    return kind not in (None, OpKind.DENY) and any(format_of(value) == "fp32" for value in node.outputs)
