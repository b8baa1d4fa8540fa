"""Messages for users: about autocast that a library switched on, about tracers and rewritten models, and about Dynamo's graph breaks."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

_SWITCHES = (
    ("trl", "TRL switches it on: bf16=True is its default, so give bf16=False and fp16=False in its config"),
    ("transformers.trainer", "transformers' Trainer switches it on: give bf16=False and fp16=False in the training arguments"),
    ("transformers.training_args", "transformers' Trainer switches it on: give bf16=False and fp16=False in the training arguments"),
    ("lightning", "Lightning switches it on: give precision='32-true'"),
    ("pytorch_lightning", "Lightning switches it on: give precision='32-true'"),
    ("accelerate", "accelerate switches it on: give mixed_precision='no'"),
)
"""Packages that switch autocast on for their users, with the remedy. A package that calls another listed package comes before it."""
_ANY_SWITCH = (
    "If you wrote none, one of these did: bf16= or fp16= in the arguments of transformers' Trainer or of TRL, where bf16=True is the "
    "default (give False), mixed_precision= of accelerate (give 'no'), precision= of Lightning (give '32-true')"
)
_EXPORT = "use amp.export_program(args)"
_REASONS = {
    "Missing tp_iternext": "it steps through an iterator that capture cannot follow",
    "missing tp_iter": "it loops over an object that capture cannot loop over",
    "Missing tp_iteritem": "it loops over an object that capture cannot loop over",
    "tp_as_number slot not implemented": "it computes with an object that capture cannot read",
    "Untraceable C tp_hash": "it hashes an object that capture cannot read",
    "Untraceable C tp_richcompare": "it compares objects that capture cannot read",
    "Attempt to trace generator": "it runs a generator, which capture cannot read",
    "Attempted to call function marked as skipped": "it calls a function that capture does not read",
    "Attempted to inline function marked as skipped": "it calls a function that capture does not read",
    "UnspecializedNNModuleVariable missing method": "it calls a method that its module does not have",
    "Unexpected type in sourceless builder": "it makes an object that capture cannot follow",
    "Attempted to wrap sparse Tensor": "it works on a sparse tensor, which capture cannot read",
    "Attempted to wrap strided NestedTensor": "it works on a nested tensor, which capture cannot read",
    "Attempted to wrap a set with tensors": "it keeps tensors in a set, which capture cannot read",
    "Failed to convert args/kwargs to proxy": "it passes objects to a torch function that capture cannot read",
    "unsupported variable type for __dict__ access": "it reads the __dict__ of an object that capture cannot read",
    "attempted to trace torch._numpy.random function": "it draws random numbers of NumPy, which NumPy draws outside of graphs",
    "attempted to trace numpy function unsupported by PyTorch": "it calls a function of NumPy that capture cannot read",
    "Uninitialized nn.Module": "it reads a module that did not call nn.Module.__init__, which capture cannot read",
    "FSDP with use_orig_params=False": "FSDP hides the parameters; wrap it with FSDP(amp, use_orig_params=True)",
}
"""Beginnings of Dynamo's reasons that name Dynamo's own internals, each with a reason in plain words."""


def plain_reason(text: str) -> str:
    """Replace `text`, a reason that Dynamo gave, by the plain words that `_REASONS` has for it. Return `text` itself if there are none."""
    return next((plain for start, plain in _REASONS.items() if text.startswith(start)), text)


def _modules_above() -> Iterator[str]:
    """Yield the names of the Python modules on the call stack, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", ""))
        frame = frame.f_back  # type: ignore[assignment]


def who_switched_autocast() -> str:
    """Return a sentence for a message: which library on the call stack switched autocast on, and the remedy. Return "" if none is found."""
    above = set(_modules_above())
    return next((say for package, say in _SWITCHES if any(f"{name}.".startswith(f"{package}.") for name in above)), "")


def ambient_autocast() -> str:
    """Return the message for a call of a rewritten model inside torch.autocast."""
    return (
        "a rewritten model was called inside torch.autocast: its casts are in the graph already, and autocast would add others "
        f"that no plan shows; call it outside the autocast region. {who_switched_autocast() or _ANY_SWITCH}"
    )


def own_autocast(place: str) -> str:
    """Return the message for a model or module, called `place`, whose own forward switches torch.autocast on."""
    return (
        f"{place} runs its matmuls and convolutions under a torch.autocast of its own, so there is nothing to rewrite. Take that "
        "torch.autocast out of its forward; if accelerate or Lightning's Fabric prepared the model, rewrite it before and give "
        "mixed_precision='no' or precision='32-true'"
    )


def traced(tracer: str) -> str:
    """Return the message for a rewritten model that is called under `tracer`, such as "torch.export". No tracer can read such a model."""
    if tracer in ("torch.jit.trace", "torch.export") and torch.onnx.is_in_onnx_export():
        tracer, instead = "torch.onnx.export", "use amp.export_onnx(path, args)"
    elif tracer == "torch.fx.symbolic_trace":
        instead = f"{_EXPORT}; for a feature extractor, make it of the original: rewrite(create_feature_extractor(model, ...))"
    elif tracer == "a FakeTensorMode":
        instead = "run it on real tensors, or trace the original model"
    else:
        instead = _EXPORT
    return f"a rewritten model cannot be traced by {tracer}; {instead}"


def one_graph(name: str) -> str:
    """Return the error message for a rewritten model of class `name` that is called by code under `torch.compile(fullgraph=True)`."""
    return (
        f"a rewritten model ({name}) cannot be part of one graph of torch.compile(fullgraph=True): it compiles its own graphs; "
        f"{COMPILE}, or leave fullgraph=True out: the graph breaks around the model"
    )


def captured_otherwise(place: str, far: float, op: str) -> str:
    """Return the message for a model or module, called `place`, that computes different fp32 values when Dynamo captures it.

    `far`: the relative L2 distance of the results. `op`: the first op whose result differs.
    """
    return (
        f"{place} computes other values when it is captured: {far:.1e} off in fp32, before any rounding, from {op} on. torch.compile alone "
        "does the same: code of the model asks whether it is compiled, as by torch.compiler.is_compiling(). Give the model what that code "
        "would make, such as a mask, as an argument, or have it make the same in both cases"
    )


COMPILE = "pass backend='inductor' to amprewrite.rewrite instead of wrapping it in torch.compile"
"""The advice for users who compile a rewritten model."""
DISABLE_REASON = "a rewritten model compiles its own graphs"
"""Reason in messages why an outer torch.compile breaks its graph at a rewritten model."""
DOOR_REASON = f"{DISABLE_REASON}: {COMPILE}, and {_EXPORT} instead of torch.export"
"""DISABLE_REASON with advice on how to compile or export the model."""
FUNCTORCH = "torch.func transforms (vmap, grad, jvp) cannot run a captured graph; transform the original model instead"
"""Reason in messages why a call inside a torch.func transform runs in fp32."""
FORWARD_MODE = (
    "forward-mode derivatives (torch.autograd.forward_ad) cannot go through a captured graph; inside dual_level() call the original "
    "model instead"
)
"""Reason in messages why a call inside forward-mode derivatives runs in fp32."""
