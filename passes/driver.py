"""One captured graph, from capture to edited graph: read → decide → plan → apply → check. The whole story on one screen.

`rewrite`, `export_program`, `verify`, calibration and the search for an accuracy read through `read_problem`, so they decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import NODE, example_value, is_checkpoint, kept_meta, tensors
from amprewrite.graphs.fx.ops.tensor_hooks import restore_hooks
from amprewrite.graphs.fx.read.aliasing import note_memory
from amprewrite.graphs.fx.read.bodies import KEPT, inner_graphs, operands
from amprewrite.graphs.fx.read.calls import read_calls
from amprewrite.graphs.fx.read.leaving import mark_leaving
from amprewrite.graphs.fx.read.magnitudes import magnitudes
from amprewrite.graphs.fx.read.reader import read_graph, without_grad
from amprewrite.graphs.fx.timing.measure import measure
from amprewrite.ir.evidence.keep_high import Careful
from amprewrite.ir.evidence.ranges import Calibration
from amprewrite.ir.op_graph import Demand, OpNode
from amprewrite.ir.pass_base import run_passes
from amprewrite.ir.plans.follow_plan import check_casts, match_region
from amprewrite.ir.plans.pad_plan import PadPlan
from amprewrite.ir.plans.plan import LEFT, ModelPlan, RegionPlan
from amprewrite.ir.policies.pad_policy import PadPolicy
from amprewrite.ir.policies.policy import Policy
from amprewrite.ir.program import Program
from amprewrite.passes import APPLY, DECIDE, WEIGH
from amprewrite.passes.apply.insert_casts import CAST
from amprewrite.passes.lower.dry_run import Refused, dry_run
from amprewrite.passes.lower.tidy import Tidy
from amprewrite.passes.normalise.fuse_patterns import gather_units
from amprewrite.tables.devices import named_device
from amprewrite.tables.errors import PassError, PlanError
from amprewrite.tables.formats import FP32
from amprewrite.tables.ops.op_lists import op_lists, op_name
from amprewrite.tables.vocabulary import Colour, Reason

CapturedGraph = torch.fx.GraphModule
"""A graph as Dynamo or torch.export captured it."""
MOST_REFUSALS = 200
"""Ops that may refuse low inputs one after another before something must be wrong with the graph."""


def read_problem(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    policy: Policy,
    *,
    name: str,
    entry: str,
    training: bool,
    names: tuple[str, ...] = (),
    pad: PadPolicy | None = None,
    fold_masks: Literal["", "fixed", "any"] = "",
    scale_loss: bool = False,
    calibration: Calibration | None = None,
    careful: Careful | None = None,
    given: ModelPlan | None = None,
) -> Program:
    """The program of a captured graph, nothing decided yet.

    `inputs` are real tensors where the graph takes its weights as inputs. `given` is the plan to follow. The other arguments are
    the program's own fields.
    """
    restore_hooks(module)
    program = read_program(module, policy, name, entry, training, names, pad)
    program.fold_masks, program.scale_loss = fold_masks, scale_loss
    program.calibration, program.careful = calibration, careful
    program.magnitudes = magnitudes(program, inputs)
    if given is not None:
        plan = given

        def match(part: Program) -> RegionPlan:
            return match_region(plan, part)

        program.match_given, program.given = match, match(program)
    return program


def read_program(
    module: torch.fx.GraphModule,
    policy: Policy,
    name: str = "graph",
    entry: str = "",
    training: bool = False,
    names: tuple[str, ...] = (),
    pad: PadPolicy | None = None,
) -> Program:
    """The program of a captured graph, nothing decided yet. `names` are those of the model's positional parameters.

    `pad` says what may be padded; None: nothing.
    """
    device = graph_device(module)
    lists = policy.op_lists(op_lists(policy.lists, policy.low, device))
    if policy.low is not FP32:
        note_memory(module.graph)
        module = gather_units(module, lists, _copy)
        module = mark_leaving(module, _copy, without_grad(module.graph) if training else None)
    graph, fx_nodes = read_graph(module, policy.low, lists, entry, names, training)
    program = Program(
        graph, policy, lists, name=name, entry=entry, training=training, device=device, module=module, fx_nodes=fx_nodes
    )
    program.planned_for = named_device(policy.device) if policy.device else None
    if policy.measure and policy.low is not FP32 and lists.rule == "cost":
        measured = program.timings = measure(program)
        kept = f"; {measured.refused} that cannot be made alone keep the table's prices" if measured.refused else ""
        program.note(f"prices measured here: {len(measured.ops)} calls of ops, {len(measured.casts)} sizes of casts{kept}")
    program.pad, program.calls = pad, read_calls(graph, fx_nodes) if pad is not None and not pad.off else {}
    return program


def decide(program: Program) -> RegionPlan:
    """Run the deciding passes; edits nothing."""
    run_passes(DECIDE, program)
    if program.given is not None:
        check_casts(program.given, program.casts)
    return program.region_plan()


def rewrite_graph(program: Program) -> tuple[torch.fx.GraphModule, RegionPlan]:
    """Decide, edit a copy of the graph, and check it on fake tensors.

    An op that refuses the low inputs it was planned to get is kept high and the plan made anew: unsure means high precision.
    The captured graph itself is never edited.
    """
    original, originals = program.module, program.fx_nodes
    assert original is not None
    bodies = _rewrite_bodies(program)
    closed = _rewrite_inner_graphs(program)
    for _ in range(MOST_REFUSALS):
        decide(program)
        copied, mapped = _copy(original)
        for name, (body, _) in (bodies | closed).items():
            setattr(copied, name, body)
        program.module, program.fx_nodes = copied, {name: mapped[node] for name, node in originals.items()}
        for name, node in program.fx_nodes.items():
            node.meta[NODE] = name
        try:
            run_passes(APPLY, program)
            dry_run(copied, _expected(program))
            _check_outputs(original, copied, program)
            run_passes((Tidy(), *WEIGH), program)
            plan = program.region_plan()
            return copied, replace(plan, bodies=tuple(body_plan for _, body_plan in (bodies | closed).values()))
        except Refused as refusal:
            if _leave_bodies(program, refusal):
                closed = _rewrite_inner_graphs(program)
            elif not _keep_logical(program, refusal):
                _keep_high(program, refusal)
        finally:
            program.module, program.fx_nodes = original, originals
    raise PassError(f"{program.name}: over {MOST_REFUSALS} ops refused low inputs; please report this model")


def _rewrite_bodies(program: Program) -> dict[str, tuple[torch.fx.GraphModule, RegionPlan]]:
    """Rewrite the bodies of activation checkpoints, by the name of their attribute.

    A body takes fp32 and gives its results in whatever colour they come; the graph around it reads them in that colour.
    """
    module = program.module
    assert module is not None
    bodies: dict[str, tuple[torch.fx.GraphModule, RegionPlan]] = {}
    for node in module.graph.nodes:
        if not is_checkpoint(node):
            continue
        part = read_body(program, node)
        name = part.name
        part.given = program.match_given(part) if program.match_given else None
        bodies[name] = rewrite_graph(part)
        given_low = _low_outputs(part)
        for vertex in _results_of(program, node):
            if vertex.carries_fp32 and program.fx_nodes[vertex.name].args[1] in given_low:
                program.graph.nodes[vertex.name] = replace(vertex, pinned=(Colour.LOW, Reason.BODY, name), tie="")
    return bodies


def _rewrite_inner_graphs(program: Program) -> dict[str, tuple[torch.fx.GraphModule, RegionPlan]]:
    """Rewrite the bodies of loops, conditions and autograd Functions, by the name of their attribute: fp32 at their border.

    One that stays as it is has a plan all the same, in which all is high.
    """
    assert program.module is not None
    bodies: dict[str, tuple[torch.fx.GraphModule, RegionPlan]] = {}
    for node, name in inner_graphs(program.module):
        if name in bodies:
            continue
        part = _read_inner_graph(program, node, name, replace(program.policy, may_decline=False))
        why = program.left_bodies.get(name, program.left_bodies.get("", KEPT.get(op_name(node.target), "")))
        if not why:
            part.given = program.match_given(part) if program.match_given else None
            bodies[name] = rewrite_graph(part)
        elif any(vertex.flops for vertex in part.graph):
            program.left_bodies[name] = why
            bodies[name] = getattr(program.module, name), _all_high(part, why)
    return bodies


def _all_high(part: Program, why: str) -> RegionPlan:
    """The plan of a graph that stays as it is."""
    for node in part.graph:
        colour = Colour.HIGH if node.carries_fp32 and node.role != "output" else Colour.PLAIN
        part.paint(node.name, colour, Reason.OPAQUE if colour is Colour.HIGH else Reason.NO_FLOAT, detail=why)
    part.note(f"{LEFT}{why}")
    return part.region_plan()


def _leave_bodies(program: Program, refusal: Refused) -> bool:
    """Where an op that holds graphs fails with them rewritten, they stay as they are."""
    assert program.module is not None
    by_name = {vertex: name for name, vertex in program.fx_nodes.items()}
    failed = by_name.get(refusal.node)
    names = [name for node, name in inner_graphs(program.module) if by_name[node] == failed and name not in program.left_bodies]
    for name in names:
        program.left_bodies[name] = f"{failed} refused it rewritten: {refusal.why}"
    return bool(names)


def _read_inner_graph(program: Program, node: torch.fx.Node, name: str, policy: Policy) -> Program:
    """The program of the graph at attribute `name`, which `node` runs; it is a copy."""
    body, _ = _copy(getattr(program.module, name))
    given = operands(node, body)
    for inner, outer in given:
        if "grapharg" in outer.meta:
            inner.meta["grapharg"] = kept_meta(outer.meta)["grapharg"]
    part = read_program(body, policy, name, program.entry, program.training)
    part.calibration, part.careful = program.calibration, program.careful
    inside, outside = ({fx_node: name for name, fx_node in each.fx_nodes.items()} for each in (part, program))
    assert part.module is not None
    copies = dict(zip(body.graph.find_nodes(op="placeholder"), part.module.graph.find_nodes(op="placeholder"), strict=True))
    known = {inside[copies[inner]]: program.magnitudes.get(outside.get(outer, "")) for inner, outer in given}
    part.magnitudes = {name: size for name, size in known.items() if size is not None}
    part.match_given = program.match_given
    return part


def read_body(program: Program, node: torch.fx.Node) -> Program:
    """The program of the checkpoint body that `node` runs, as free as `program` to be decided; it is a copy."""
    assert isinstance(node.args[0], torch.fx.Node) and program.module is not None
    part = _read_inner_graph(program, node, str(node.args[0].target), program.policy)
    if not _written_outside(program, _results_of(program, node)):
        _free_outputs(part)
    return part


def _results_of(program: Program, node: torch.fx.Node) -> list[OpNode]:
    """The vertices that stand for the results of the body that `node` runs."""
    by_node = {each: name for name, each in program.fx_nodes.items()}
    return [program.graph[by_node[user]] for user in node.users if user in by_node]


def _written_outside(program: Program, results: list[OpNode]) -> bool:
    """Whether the graph around a body writes its results in place: they leave it in fp32, as those writes find it."""
    names, ties = {vertex.name for vertex in results}, {vertex.tie for vertex in results if vertex.tie}
    return any(other.tie in ties and other.name not in names for other in program.graph)


def read_parts(program: Program) -> None:
    """Read the bodies in a program while capture's facts are at hand: names come from them."""
    assert program.module is not None
    for node in program.module.graph.nodes:
        if is_checkpoint(node):
            program.parts[node] = read_body(program, node)
            read_parts(program.parts[node])


def _free_outputs(part: Program) -> None:
    """Let the results of a body leave it in any colour."""
    for node in list(part.graph):
        if node.role == "output":
            part.graph.nodes[node.name] = replace(node, operands=tuple(replace(o, demand=Demand.ANY) for o in node.operands))


def _low_outputs(part: Program) -> set[int]:
    """Places among the results of a body that come out low."""
    output = next(node for node in part.fx_nodes.values() if node.op == "output")
    if not any(o.demand is Demand.ANY for node in part.graph if node.role == "output" for o in node.operands):
        return set()
    by_node = {node: name for name, node in part.fx_nodes.items()}
    results = output.args[0] if isinstance(output.args[0], tuple | list) else (output.args[0],)
    return {
        place
        for place, result in enumerate(results)
        if isinstance(result, torch.fx.Node) and part.paints[by_node[result]].colour is Colour.LOW
    }


def _check_outputs(original: torch.fx.GraphModule, edited: torch.fx.GraphModule, program: Program) -> None:
    """Whatever was padded inside: results have the shapes they had."""
    if not program.pads:
        return
    before, after = (next(n for n in each.graph.nodes if n.op == "output") for each in (original, edited))
    for old, new in zip(before.all_input_nodes, after.all_input_nodes, strict=True):
        if [tuple(t.shape) for t in tensors(example_value(old))] != [tuple(t.shape) for t in tensors(example_value(new))]:
            raise Refused(new, "a result would leave the graph padded")


def _keep_logical(program: Program, refusal: Refused) -> bool:
    """Where a graph with pads failed, take pads for the cause: none through this op, and none at all if that was done before."""
    if not program.pads or program.given is not None:
        return False
    name = {node: name for name, node in program.fx_nodes.items()}.get(refusal.node)
    if name is None or name in program.pad_refused:
        program.pads_off = True
        program.note(f"nothing is padded: {name or refusal.node.name} refused padded inputs ({refusal.why})")
    else:
        program.pad_refused[name] = refusal.why
    program.paints, program.casts, program.candidates, program.pads = {}, (), (), PadPlan()
    return True


def _keep_high(program: Program, refusal: Refused) -> None:
    by_node = {node: name for name, node in program.fx_nodes.items()}
    name = by_node.get(refusal.node)
    if program.given is not None:
        raise PlanError(f"the given plan cannot run: {name or refusal.node.name} refused: {refusal.why}; colour it high") from refusal
    if name is None or program.paints[name].colour is not Colour.LOW:
        readers = [by_node[user] for user in refusal.node.users if user in by_node] if CAST in refusal.node.meta else []
        raise PassError(f"{program.name}: {name or refusal.node.name} failed after the rewrite: {refusal.why} {readers}") from refusal
    program.keep_high(name, refusal.why)


def _expected(program: Program) -> dict[torch.fx.Node, torch.dtype]:
    """The dtype that each painted node must give, for the nodes that run low and the ones we aimed."""
    low = program.policy.low.dtype
    return {
        program.fx_nodes[name]: low if paint.colour is Colour.LOW else FP32.dtype
        for name, paint in program.paints.items()
        if paint.colour is not Colour.PLAIN and program.graph[name].role == "op"
    }


def _copy(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, dict[torch.fx.Node, torch.fx.Node]]:
    mapped: dict[torch.fx.Node, torch.fx.Node] = {}
    graph = torch.fx.Graph()
    output = next(node for node in module.graph.nodes if node.op == "output")
    for node in module.graph.nodes:
        mapped[node] = graph.node_copy(node, mapped.__getitem__)
        mapped[node].meta = kept_meta(node.meta)
    assert mapped[output].op == "output"
    graph._codegen = module.graph._codegen
    copied = torch.fx.GraphModule(module, graph, type(module).__name__)
    copied.meta.update(module.meta)
    for attribute in ("_param_name_to_source", "compile_subgraph_reason"):
        if hasattr(module, attribute):
            setattr(copied, attribute, getattr(module, attribute))
    return copied, mapped


def graph_device(module: torch.fx.GraphModule) -> str:
    """Where the graph runs: the first accelerator among its values, else the CPU."""
    kinds = {t.device.type for node in module.graph.nodes for t in tensors(example_value(node))}
    return next(iter(sorted(kinds - {"cpu", "meta"})), "cpu")
