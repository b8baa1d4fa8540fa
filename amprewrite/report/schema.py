"""The keys of a plan's JSON form and their meanings."""

from __future__ import annotations

from dataclasses import fields

from amprewrite.ir.plans.pad_plan import PadCopy, PaddedValue, PadPlan, PadRegion
from amprewrite.ir.plans.plan import Candidate, Cast, ModelPlan, NodeEdit, NodePlan, RegionPlan, Skipped
from amprewrite.ir.plans.product_plan import GemmPlan, ProductPlan, QuantisedCopy, QuantisedProducts
from amprewrite.ir.plans.versions import SCHEMA

KINDS = {
    "plan": ModelPlan,
    "region": RegionPlan,
    "node": NodePlan,
    "cast": Cast,
    "candidate": Candidate,
    "quantised": QuantisedProducts,
    "product": ProductPlan,
    "gemm": GemmPlan,
    "fp8 copy": QuantisedCopy,
    "pads": PadPlan,
    "pad region": PadRegion,
    "padded value": PaddedValue,
    "pad copy": PadCopy,
    "edit": NodeEdit,
    "skipped": Skipped,
}
MEANING = {
    "version": f"version of this form: {SCHEMA}",
    "low": "format that low means: bf16 or fp16",
    "lists": "name of the op lists",
    "regions": "one object a captured graph",
    "skipped": "parts that run outside the graphs",
    "notes": "remarks, a sentence each",
    "name": "of a node: unique within its region",
    "nodes": "in a canonical order: makers before readers",
    "casts": "of a region: they follow from the colours, and may be left empty; of a candidate: how many",
    "training": "whether gradients were on",
    "entry": "path of the module that was called",
    "bodies": "always empty: bodies are regions of their own",
    "edits": "changes of single ops that are neither casts nor pads",
    "node": "the op that is edited",
    "what": "a value of amprewrite.tables.vocabulary.Edit",
    "on": "false if the edit is possible but switched off",
    "scales_loss": "whether gradients are multiplied by the loss scale inside the region",
    "candidates": "plans that were compared by price, this one first",
    "priced_on": "the device of these prices",
    "seconds": "modelled or measured time of one pass",
    "op": "ATen base name, or the role",
    "colour": "low, high or plain: the one key to edit",
    "reason": "name of a member of amprewrite.tables.vocabulary.Reason",
    "because_of": "the node that is the cause, or empty",
    "detail": "a detail of the reason",
    "kind": "the list that its op is on, or null",
    "dtype": "of the result, after the rewrite",
    "shape": "of the result: numbers, or symbols as text",
    "flops": "of a matmul or convolution; 0 for other ops",
    "module": "path of the module around it",
    "source": "file:line",
    "role": "op, input, parameter, buffer, constant or output",
    "inputs": "names of the nodes whose fp32 values it reads",
    "value": "the node whose result is copied",
    "to": "format of the copy",
    "users": "nodes that read the copy",
    "saturate": "whether values are clamped to the range first",
    "weight": "whether it copies a parameter",
    "write_version": "number of in-place writes to the value before the copy",
    "gradient_blocks": "weights that share an autograd node, which returns their gradients",
    "region.quantised": "fp8 products; left out if none was asked for",
    "recipe": "name of a row of amprewrite.tables.recipes",
    "products": "low products of rows and a matrix, a GEMM each way",
    "copies": "of quantised: fp8 copies, which follow from the products and may be left empty",
    "product.node": "the product",
    "gemms": "the GEMMs that a run of the graph has",
    "gemm": "out, grad_in or grad_weight",
    "formats": 'of its two operands, such as "e5m2 x e4m3"; "bf16": not in fp8',
    "gemm.reason": "name of a member of amprewrite.ir.plans.product_plan.ProductReason",
    "fp8 copy.value": "the node whose result is copied, or its gradient",
    "fp8 copy.weight": "whether it copies a parameter or a view of one",
    "scales": "one a tensor, or one for each of its rows or columns",
    "readers": 'GEMMs that read the copy, such as "linear_3.grad_weight"',
    "fp8 copy.role": "x, w, or g for a gradient",
    "kept": "whether backward reads it",
    "pads": "all padding of the region",
    "pads.regions": "groups of dims that were considered, padded or not",
    "pads.values": "results that ops return padded",
    "pads.copies": "changes of size",
    "padded value.value": 'node, "node#1" for one of several results, or "node -> bf16" for its cast copy',
    "layout": "[dim, [[logical, physical extent] of each axis in it]] of every padded dim, as its readers see it",
    "have": "padded layout of the value as it arrives",
    "refresh": "whether padding is cut off and replaced by zeros",
    "pad copy.weight": "whether it is a parameter, which its cast pads",
    "size": "extent in the model",
    "padded": "extent in memory; the size itself if it is not padded",
    "dims": '"linear.1": dim 1 of the result of node linear',
    "pad region.pads": "values padded where the region is entered",
    "slices": "values sliced where it is left",
    "weights": "weights padded by their casts",
    "weight_copies": "weights padded by copies of their own",
    "bytes_added": "bytes of padding that a forward writes",
    "gain": "seconds that a call saves, or null if it was not asked for",
    "measured": "whether the gain was measured, not predicted",
    "pad region.why": "why it is padded, or why not",
    "reasons": "where padding had to stop, and why",
    "where": "place in the code",
    "why": "a sentence",
}


def schema() -> dict[str, dict[str, str]]:
    """Return {kind of object: {key: meaning}} for the JSON form of a plan. `CastPlan.schema` is the public function."""
    return {kind: {f.name: _meaning(kind, f.name) for f in fields(cls) if f.name != "basis"} for kind, cls in KINDS.items()}


def _meaning(kind: str, key: str) -> str:
    return MEANING.get(f"{kind}.{key}") or MEANING.get(key, "")
