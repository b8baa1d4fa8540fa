"""What each key of a plan's JSON form means."""

from __future__ import annotations

from dataclasses import fields

from amprewrite.plan import SCHEMA, Candidate, Cast, CastPlan, NodePlan, RegionPlan, Skipped

KINDS = {"plan": CastPlan, "region": RegionPlan, "node": NodePlan, "cast": Cast, "candidate": Candidate, "skipped": Skipped}
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
    "candidates": "what was weighed, the plan itself first",
    "priced_on": "the device whose prices those are",
    "seconds": "modelled or measured time of one pass",
    "op": "ATen base name, or the role",
    "colour": "low, high or plain: the one key to edit",
    "reason": "name of a member of amprewrite.colour.Reason",
    "because_of": "the node that is the cause, or empty",
    "detail": "a word more on the reason",
    "kind": "the list that its op is on, or null",
    "dtype": "of the result, after the rewrite",
    "shape": "of the result: numbers, or symbols as text",
    "flops": "of a matmul or convolution, else 0",
    "module": "path of the module around it",
    "source": "file:line",
    "role": "op, input, parameter, buffer, constant or output",
    "inputs": "names of the nodes whose fp32 values it reads",
    "value": "the node whose result is copied",
    "to": "format of the copy",
    "users": "nodes that read the copy",
    "saturate": "whether values are clamped to the range first",
    "weight": "whether it copies a parameter",
    "epoch": "in-place writes that the value had seen",
    "where": "place in the code",
    "why": "a sentence",
}


def schema() -> dict[str, dict[str, str]]:
    """Keys and their meaning by kind of object; see CastPlan.schema."""
    return {kind: {f.name: MEANING.get(f.name, "") for f in fields(cls) if f.name != "basis"} for kind, cls in KINDS.items()}
