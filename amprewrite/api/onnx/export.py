"""Export the plain clone of a rewritten model to fp32 ONNX with torch.onnx.export, and check it on the example inputs."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from amprewrite.api.onnx.job import fp8_products
from amprewrite.api.onnx.plans import base_name, region_ops
from amprewrite.graphs.log_quiet import Quiet
from amprewrite.graphs.onnx.run.compare import worst_error
from amprewrite.graphs.onnx.run.onnx_runtime import has_runtime, is_large, session
from amprewrite.graphs.onnx.run.samples import Feed
from amprewrite.graphs.onnx.write.apply_plan import OPSET
from amprewrite.ir.plans.plan import ModelPlan
from amprewrite.ir.policies.policy import Policy
from amprewrite.runtime.ambient.kept_state import state_kept
from amprewrite.runtime.compiler.dynamo import ONE_EXPORT
from amprewrite.runtime.compiler.heard import exported_under_autocast
from amprewrite.runtime.model.rewritten import RewrittenBase, capture_now, face_of, plain_of, session_of, wrap
from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.boundary.members import buffers_in, parameters_in
from amprewrite.tables.errors import CaptureError, PolicyError
from amprewrite.tables.formats import FP32, WIDE
from amprewrite.tables.vocabulary import Reason
from amprewrite.torch_internals.trees import tree_leaves

_TALKATIVE = [
    logging.getLogger(name)
    for name in (
        "torch.onnx._internal.exporter._registration", "torch.onnx._internal.exporter._compat", "onnxscript.version_converter"
    )
]  # fmt: skip
"""Loggers of the exporter that are silenced during the export. Their advice is not needed, since the export is checked here."""
AGREES = 1e-2
"""An fp32 export counts as wrong if the relative L2 error of an output is this large or larger."""


def exported(
    amp: Any, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None, opset: int | None, dynamic_shapes: Any,
    products: Any, calibrated: bool,
) -> tuple[ir.Model, Feed, Policy, tuple[str, ...]]:
    """Export the plain model. Return (fp32 ONNX model, {input name: example input}, policy for the file, notes for the user).

    If `products` is not None, it replaces the option given to `rewrite`. `calibrated` is True if the caller gave samples, which fp8
    products need for their scales. Raises PolicyError for invalid arguments, CaptureError if torch.onnx.export fails or its file does not
    compute the same as the model.
    """
    if not isinstance(amp, RewrittenBase):
        raise PolicyError(f"export_onnx takes a model from amprewrite.rewrite, not {type(amp).__name__}")
    if args is None and kwargs is None:
        raise PolicyError("export_onnx needs example inputs: pass args=, kwargs= or both")
    if args is not None and not isinstance(args, (tuple, list)):
        raise PolicyError(f"export_onnx takes args as a tuple of the positional inputs, not {type(args).__name__}: write (x,)")
    args, kwargs = tuple(args or ()), dict(kwargs or {})
    plain, session = plain_of(amp), session_of(amp)
    device = next((t.device.type for t in (*parameters_in(plain), *buffers_in(plain))), "cpu")
    policy = session.policy_for(device)
    notes: tuple[str, ...] = ()
    # The module of an ExportedProgram gets no note to call eval(): its mode is fixed, and its own attribute `eval` raises an error.
    if plain.training and "eval" not in vars(plain):
        notes += ("the model was in training mode: dropout and batch norm are exported as in training; call eval() first",)
    if policy.low is FP32:
        notes += ("written in fp32, as the model runs here; give rewrite a dtype to choose a format",)
    if products is not None:
        checked = fp8_products(products, policy, calibrated)
        if checked is not None:
            checked.check("module", [path for path, _ in plain.named_modules()])
        policy = replace(policy, products=checked)
    if policy.products is not None and not calibrated:
        notes += (f"an ONNX file has fp8 products if calibration= gives their scales; without it they read {policy.low.name}",)
        policy = replace(policy, products=None)
    elif policy.products is not None:
        if opset is not None and opset < OPSET:
            raise PolicyError(f"opset={opset} has no fp8 that compilers read: leave opset= out, take {OPSET}, or leave calibration= out")
        opset = opset or OPSET
        rules = tuple(rule for rule in policy.products.rules if rule.scope != "node")
        notes += ("rules of products= by node are left out: nodes of the file have other names",) * (rules != policy.products.rules)
        # fused=True, because the runtime that loads the file fuses casts, as a compiler does
        policy = replace(policy, products=replace(policy.products, rules=rules, fused=True))
    wide = any(override.word == WIDE for override in policy.overrides)
    notes += ("wide products read fp32 in ONNX files: no op there multiplies bf16 and returns fp32",) * wide
    # leave node overrides out here: they name nodes of the PyTorch graph, and the plan from `torch_plan` brings them into the file
    kept = (replace(o, word="high") if o.word == WIDE else o for o in policy.overrides if o.scope != "node")
    policy = replace(policy, overrides=tuple(kept))
    if opset is not None and (isinstance(opset, bool) or not isinstance(opset, int)):
        raise PolicyError(f"opset= takes a number such as 20, not {shown(opset)}")
    model = _export(plain, args, kwargs, opset, dynamic_shapes)
    written = model.opset_imports.get("", 0)
    if opset is not None and written != opset:
        raise CaptureError(f"torch.onnx.export writes opset {written} where {opset} was asked for; leave opset= out, or ask for another")
    feed = _feed(model, plain, args, kwargs)
    if feed and not _agrees(model, feed, plain, args, kwargs):
        whole = _export(plain, args, kwargs, opset, dynamic_shapes, optimize=False)
        if _agrees(whole, feed, plain, args, kwargs):
            model = whole
            notes += ("the exporter's optimiser changes what this model computes: exported without it",)
        elif _is_random(plain, args, kwargs):
            notes += ("the fp32 export cannot be compared with the model, whose results are random",)
        else:
            raise CaptureError(
                f"torch.onnx.export makes a file that does not compute what {type(plain).__name__} does on the example inputs, in fp32 "
                "already; change the part of the model that it gets wrong, or, if that is meant, export with torch.onnx.export and rewrite "
                "the file by rewrite_onnx"
            )
    return model, feed, policy, notes


def torch_plan(
    amp: RewrittenBase, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None, plan: ModelPlan | None
) -> tuple[ModelPlan, bool] | None:
    """Return (plan of the PyTorch graph, flag) if the exported file must take formats from this plan; None if it takes none.

    If `plan`, or the option `plan=` of `rewrite`, is given, return it with the flag False: the file takes all its formats. Otherwise, if
    `rewrite` got `node:` overrides, capture a plan and return it with the flag True: the file takes only the formats of these nodes.
    """
    options = session_of(amp).options
    given = plan if plan is not None else options.given
    if given is not None:
        return given, False
    if not any(override.scope == "node" for override in options.overrides):
        return None
    return _captured_plan(amp, args, kwargs), True


def kept_out(amp: RewrittenBase, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None, model: ir.Model) -> frozenset[str]:
    """Return the ATen base names, such as "softmax", of the ops that `amp` runs with torch.autocast disabled.

    A capture of `amp` finds these ops. If a part of `amp` cannot be captured, return all ops that ran under any context manager such as
    `torch.no_grad`, to be safe: the exported file `model` marks these ops, but does not show which context manager it was.
    """
    inside = region_ops(model)
    if not inside:
        return inside
    plan = _captured_plan(amp, args, kwargs)
    if plan.skipped:
        return inside
    off = (Reason.INSIDE_AUTOCAST, "enabled=False")
    return frozenset(base_name(node.op) for node in plan.nodes if (node.reason, node.detail) == off)


def _captured_plan(amp: RewrittenBase, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None) -> ModelPlan:
    """Return the plan of a call with these inputs. A clone makes the call, so that `amp` itself does not change."""
    clone = wrap(plain_of(amp), session_of(amp).options, face_of(amp))
    with ONE_EXPORT, torch.no_grad():
        capture_now(clone, tuple(args or ()), dict(kwargs or {}))
    plan: ModelPlan = clone.plan
    return plan


def _export(
    plain: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], opset: int | None, dynamic_shapes: Any, optimize: bool = True
) -> ir.Model:
    def export() -> ir.Model:
        try:
            with ONE_EXPORT, Quiet(*_TALKATIVE), torch.no_grad():
                program = torch.onnx.export(
                    plain,
                    args if kwargs else (*args, {}),  # append {}, because the exporter takes a dict in last place for kwargs
                    kwargs=kwargs,
                    dynamo=True,
                    verbose=False,
                    opset_version=opset,
                    dynamic_shapes=dynamic_shapes,
                    optimize=optimize,
                )
        except Exception as error:
            cause = error.__cause__ or error  # report the cause: the exporter wraps it in an error with a long text of advice
            lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
            raise CaptureError(
                f"torch.onnx.export cannot export {type(plain).__name__}: {type(cause).__name__}: {' '.join(lines[:2])[:300]}; "
                "export the plain model with torch.onnx.export to see its full report"
            ) from error
        assert program is not None
        model: ir.Model = program.model
        return model

    return exported_under_autocast(plain, (args, kwargs), export)


def _agrees(model: ir.Model, feed: Feed, plain: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Run file and model in fp32. Return True if the results agree, if file or model cannot run here, or if shapes differ."""
    if is_large(model) or not has_runtime():
        return True
    try:
        got = session(ir.to_proto(model), 0).run(None, feed)
        arrays = _results(plain, args, kwargs)
    except Exception:
        return True
    if [a.shape for a in arrays] != [g.shape for g in got]:
        return True
    return worst_error([arrays], [got]) < AGREES


def _is_random(plain: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Run the model with two random seeds. Return True if the results differ."""
    once, again = (_results(plain, args, kwargs, seed) for seed in range(2))
    return not all(a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(once, again, strict=True))


def _results(plain: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None = None) -> list[np.ndarray]:
    """Run the model and return its result tensors as arrays. The model, its inputs and the random state of the process do not change.

    `seed` sets the random state for the call; None leaves the state of the process.
    """
    with torch.no_grad(), state_kept(plain):
        if seed is not None:
            torch.manual_seed(seed)
        found = tree_leaves(copy.deepcopy(plain)(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
    return [_array(leaf) for leaf in found if isinstance(leaf, torch.Tensor)]


def _feed(model: ir.Model, plain: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Feed:
    """Return the example inputs by the file's input names; {} if tensors and names do not match one to one."""
    names = [str(value.name) for value in model.graph.inputs]
    tensors = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    if not args and set(names) == set(tensors):
        return {name: _array(tensors[name]) for name in names}
    with contextlib.suppress(TypeError, ValueError):
        bound = inspect.signature(plain.forward).bind(*args, **kwargs)
        args, kwargs = tuple(bound.arguments.values()), {}
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if len(leaves) != len(names):
        return {}
    return {name: _array(leaf) for name, leaf in zip(names, leaves, strict=True)}


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array. Arrays of bf16 and fp8 have dtypes of ml_dtypes: torch itself converts no such tensor."""
    held, kind = tensor.detach().cpu(), getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."), None)
    if kind is None:
        return held.numpy()
    return held.view(torch.int16 if held.itemsize == 2 else torch.uint8).numpy().view(kind)
