"""Capture a whole model ahead of time with torch.export, for `.pt2` files and for tools that take an ExportedProgram.

1. Export the plain model (`strict=False`) and take the exported module as an fx graph.
2. Clean the graph: drop dtype checks recorded with conversions, drop guards (step 6 makes new ones), and inline `no_grad`
   subgraphs, so that the passes see every op. Autocast regions and other subgraphs are not opened; their inputs and results keep their
   formats.
3. Plan and edit the graph like any captured graph.
4. In fp16, run the captured graph in fp32 on the example inputs, as the first calls of a rewritten model do. If fp16 cannot hold a value
   that is planned low, repeat step 3 with the observed ranges. Buffers and random state are restored.
5. For a frozen model, store weights in the low format if the graph reads them only in this format. The file is then about half as large,
   and the program casts none of these weights.
6. Export the edited module again, with the same dynamic shapes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import example_value, tensors
from amprewrite.passes.driver import CapturedGraph, clean_exported, pin_high
from amprewrite.passes.lower.read_frozen_weights import store_low
from amprewrite.passes.normalise.strip_checks import strip_checks
from amprewrite.passes.weigh_plans import weighed
from amprewrite.report.cast_plan import CastPlan
from amprewrite.runtime.captured.look_ahead import rewrite_for
from amprewrite.runtime.compiler.dynamo import ONE_EXPORT, parameter_names, refuse_ambient_autocast
from amprewrite.runtime.compiler.heard import exported_under_autocast
from amprewrite.runtime.model.rewritten import RewrittenBase, plain_of, session_of
from amprewrite.runtime.options import part_paths
from amprewrite.runtime.weights.half_values import is_half
from amprewrite.tables.boundary.members import named_buffers_in
from amprewrite.tables.errors import AmpRewriteError, CaptureError
from amprewrite.tables.vocabulary import Reason
from amprewrite.torch_internals.dispatch import FakeTensor, is_wrapped_by_transform


def export_with_plan(
    amp: RewrittenBase, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, **options: Any
) -> tuple[torch.export.ExportedProgram, CastPlan]:
    """Export the rewritten graph of `amp`, and return (ExportedProgram, its plan). Inputs and outputs of the program are fp32.

    `args` and `kwargs` are example inputs. `options`, such as `dynamic_shapes`, are passed to torch.export.export. Parameters keep their
    names. Raises CaptureError if torch.export cannot capture the model.
    """
    with ONE_EXPORT:  # plan under the lock, too: functions called here would annotate the graph that another thread exports meanwhile
        return _export_with_plan(amp, args, dict(kwargs or {}), options)


def _export_with_plan(
    amp: RewrittenBase, args: tuple[Any, ...], kwargs: dict[str, Any], options: Mapping[str, Any]
) -> tuple[torch.export.ExportedProgram, CastPlan]:
    refuse_ambient_autocast()
    session = session_of(amp)
    plain = plain_of(amp)
    module = capture(plain, args, kwargs, **options)
    names = parameter_names(plain.forward)
    # may_decline=False: use the low format even if this device gains nothing from it, because the exported file may run elsewhere
    captured = session.read(module, (), "graph0", "", names, plain.training, may_decline=False)
    _leave_between(captured, part_paths(plain, session.options.granularity))
    edited, region = rewrite_for(captured, args, kwargs, session.learn, session.warn_fp32, session.overflowed)
    # `agree` makes ops in the model's other graphs run in the formats of this export. Call it only if the user chose dtype=. Otherwise
    # the graphs on this device may run in fp32, and must not get the low formats of the exported file.
    if session.options.low is not None:
        with session.lock:
            session.agree(region)
    if region.left and session.options.strict:
        raise CaptureError(region.left[0])
    _keep_out_of_state(edited, plain)
    if session.options.frozen is not None:
        store_low(edited)
    exported = _export(edited, plain, args, kwargs, _spread(options, plain))
    strip_checks(exported.graph_module)
    policy = captured.problem.policy
    plan = CastPlan(policy.low.name, weighed(region).flat("graph0"), notes=tuple(session.notes), lists=policy.lists_name)
    return exported, plan


def _leave_between(captured: Captured, parts: tuple[str, ...]) -> None:
    """Keep all ops outside of the modules at the paths `parts` in fp32, as the rewritten model does. Do nothing for ()."""
    for each in captured.with_parts() if parts else ():
        outside = {
            node.name for node in each.problem.graph if not any(node.module == part or node.module.startswith(f"{part}.") for part in parts)
        }
        pin_high(each, Reason.BETWEEN, "", outside)


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, **options: Any) -> CapturedGraph:
    """Capture the whole plain model with torch.export, and return it as one fx graph, cleaned for the passes.

    Raises CaptureError with the message of torch.export if the export fails.
    """
    refuse_ambient_autocast()

    def export() -> torch.nn.Module:
        return _export(model, model, args, dict(kwargs or {}), options).module(check_guards=False)

    module = exported_under_autocast(model, (args, kwargs), export, _computes_half)
    assert isinstance(module, CapturedGraph)
    _refuse_values_missing(module, model)
    clean_exported(module)
    return module


def _computes_half(module: nn.Module) -> bool:
    """True if an op of the exported graph gives a value in half precision."""
    assert isinstance(module, CapturedGraph)
    return any(is_half(each) for node in module.graph.nodes for each in tensors(example_value(node)))


def _refuse_values_missing(module: CapturedGraph, model: nn.Module) -> None:
    """Raise CaptureError if a constant of the exported module has no values. torch.export makes such constants of some torch.func code."""
    for node in module.graph.find_nodes(op="get_attr"):
        held = getattr(module, str(node.target), None)
        if isinstance(held, FakeTensor) or (isinstance(held, torch.Tensor) and is_wrapped_by_transform(held)):
            raise CaptureError(
                f"torch.export cannot capture {type(model).__name__} whole: it stores a constant, {node.target}, without values in place "
                "of a value that torch.func computes; the rewritten model itself runs region by region: call it instead of exporting it"
            )


def _export(
    module: nn.Module, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Mapping[str, Any]
) -> torch.export.ExportedProgram:
    try:
        with ONE_EXPORT:
            return torch.export.export(module, args, kwargs, **{"strict": False, **options})
    except AmpRewriteError:
        raise
    except Exception as error:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        raise CaptureError(
            f"torch.export cannot capture {type(model).__name__} whole: {type(error).__name__}: {said[:300]}; "
            "the rewritten model itself runs region by region: call it instead of exporting it"
        ) from error


def _spread(options: Mapping[str, Any], plain: nn.Module) -> dict[str, Any]:
    """Return the export options for the edited graph, in which the arguments of the model's `*rest` are called rest_0, rest_1, and so on.

    If `dynamic_shapes` has an entry for `*rest`, it becomes one entry for each of these arguments.
    """
    shapes = options.get("dynamic_shapes")
    kinds = {name: each.kind for name, each in inspect.signature(plain.forward).parameters.items()}
    if isinstance(shapes, tuple | list):
        several = [kind is inspect.Parameter.VAR_POSITIONAL for kind in kinds.values()][: len(shapes)]
        spread = [part for each, many in zip(shapes, several, strict=False) for part in (each if many and each is not None else (each,))]
        return {**options, "dynamic_shapes": tuple(spread)} if any(several) else dict(options)
    if not isinstance(shapes, dict):
        return dict(options)
    named: dict[str, Any] = {}
    for name, each in shapes.items():
        if kinds.get(name) is inspect.Parameter.VAR_POSITIONAL and each is not None:
            named |= {f"{name}_{place}": part for place, part in enumerate(each)}
        else:
            named[name] = each
    return {**options, "dynamic_shapes": named}


def _keep_out_of_state(edited: nn.Module, plain: nn.Module) -> None:
    """Keep buffers out of the state_dict of `edited` if they are not in the state_dict of `plain`."""
    kept = plain.state_dict().keys()
    for name, _ in named_buffers_in(plain, remove_duplicate=False):
        path, _, last = name.rpartition(".")
        if name not in kept and name in edited.state_dict():
            edited.get_submodule(path)._non_persistent_buffers_set.add(last)
