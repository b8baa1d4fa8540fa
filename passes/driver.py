"""Read, plan, edit and check one captured graph: these functions run the passes in order.

`rewrite`, `export_program`, `verify`, calibration and the search for an accuracy all call `read_problem`, so that they decide alike.

A *body* is a subgraph: the graph inside an activation checkpoint, a loop, a condition or an autograd Function.

All of this is one file because a body is read and rewritten like the graph around it, and because both exchange facts: the graph tells the
body which of the body's results must be exact, and the body tells the graph which of its inputs must be exact.

Op names hard-coded in this file: `getitem`, which picks one result of a body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
import torch.fx

from amprewrite.graphs.fx.captured import Captured, EditedGraph, Reading, copy_graph
from amprewrite.graphs.fx.flow.attention_calls import read_repeated_heads, read_strided_masks
from amprewrite.graphs.fx.flow.kernel_pins import read_bare_taps, read_by_many, read_run_by_steps, trained_values
from amprewrite.graphs.fx.flow.summands import read_summands
from amprewrite.graphs.fx.node_facts import NODE, example_value, is_checkpoint, is_opaque, kept_meta, note_held, place_operands, tensors
from amprewrite.graphs.fx.ops.attention_masks import ATTENTION, MASK, argument, read_masks
from amprewrite.graphs.fx.read.bodies import KEPT, inner_graphs, kept_high, leads_nowhere, operands
from amprewrite.graphs.fx.read.calls import read_bare_norms, read_calls, read_far_constants, read_matrix_products
from amprewrite.graphs.fx.read.number_facts import factors, magnitudes, offsets, read_counts
from amprewrite.graphs.fx.read.reader import read_graph, turns_grad_on
from amprewrite.graphs.fx.run.observer import exchanges_infinities
from amprewrite.ir.evidence.agreed import NOTHING_AGREED, Agreed
from amprewrite.ir.evidence.counts import Count
from amprewrite.ir.evidence.ranges import Calibration, KeepHigh
from amprewrite.ir.follow_plan import match_region
from amprewrite.ir.held_wide import held
from amprewrite.ir.op_graph import Demand, OpNode
from amprewrite.ir.pass_base import Decisions, Problem, run_passes
from amprewrite.ir.plans.plan import FLUSHES, LEFT, ModelPlan, RegionPlan
from amprewrite.ir.policies.policy import PadPolicy, Policy
from amprewrite.passes import APPLY, CLEAN_EXPORTED, NORMALISE, TIDY, decide
from amprewrite.passes.apply.insert_casts import CAST
from amprewrite.passes.apply.scale_loss import nodes_outside
from amprewrite.passes.lower.dry_run import Refused, dry_run
from amprewrite.passes.repaint.repaint_as_autocast import Roundings
from amprewrite.tables.devices import named_device
from amprewrite.tables.errors import PassError, PlanError
from amprewrite.tables.extras import load_extra
from amprewrite.tables.formats import FP32, WIDE
from amprewrite.tables.ops.op_lists import op_lists, op_name
from amprewrite.tables.vocabulary import Colour, Edit, Held, Reason

T = TypeVar("T")
CapturedGraph = torch.fx.GraphModule
"""A graph captured by Dynamo or torch.export."""
MOST_REFUSALS = 200
"""Largest number of attempts to rewrite one graph. After each attempt whose edited graph fails its check, the graph is planned again."""


def read_problem(
    module: torch.fx.GraphModule,
    policy: Policy,
    *,
    inputs: Sequence[Any] = (),
    name: str = "graph",
    entry: str = "",
    training: bool = False,
    names: tuple[str, ...] = (),
    pad: PadPolicy | None = None,
    fold_masks: Literal["", "fixed", "any"] = "",
    scale_loss: bool = False,
    calibration: Calibration | None = None,
    keep_high: KeepHigh | None = None,
    agreed: Agreed = NOTHING_AGREED,
    given: ModelPlan | None = None,
    handed: Sequence[Count | None] = (),
) -> Captured:
    """Return a captured graph with its `Problem`, the planner's input: op graph, properties of its ops, and policy. Nothing is decided yet.

    `inputs` are the real tensors that the graph takes, its weights among them; () if they are not available. `names` are the names of the
    model's positional parameters. `given` is the plan to follow. `handed`, for body graphs, has an item for each input: a `Count`, which
    says if the input's elements count something, such as positions, or None if unknown. The other arguments are fields of `Problem`.

    If all graphs of the model share one plan (`policy.parity`), a graph without gradients is read like a graph that records gradients.
    """
    device = graph_device(module)
    lists = policy.op_lists(op_lists(policy.lists, policy.low, device))
    normalised = EditedGraph(module, {})
    alike = policy.parity is not None
    grad = torch.is_grad_enabled() or (alike and not turns_grad_on(module.graph))
    reading = Reading(lists, policy.low, training or alike, grad, any(map(is_opaque, module.graph.nodes)), inputs, handed)
    note_held(module.graph)
    place_operands(module.graph)
    run_passes(NORMALISE, reading, normalised, name)
    module = normalised.module
    graph, nodes = read_graph(module, policy.low, lists, entry, names, reading.training, grad, device)
    trained = trained_values(nodes)
    problem = Problem(
        graph=graph, policy=policy, lists=lists, name=name, entry=entry, training=training, scale_loss=scale_loss,
        fold_masks=fold_masks, device=device, planned_for=named_device(policy.device) if policy.device else None,
        calibration=calibration, keep_high=keep_high, agreed=agreed, pad=pad, trained=trained,
        calls=read_calls(graph, nodes) if pad is not None and not pad.off else {}, bare_norms=read_bare_norms(nodes),
        far_constants=read_far_constants(nodes, policy.low), bare_taps=read_bare_taps(nodes, policy.low) if reading.training else (),
        read_by_many=read_by_many(graph, nodes, trained), run_by_steps=read_run_by_steps(nodes, policy.low, trained) if training else (),
        matrix_products=read_matrix_products(graph, nodes, trained) if _asks_of_products(policy, given) else {},
    )  # fmt: skip
    captured = Captured(problem, module, nodes)
    read_counts(captured, inputs, handed)
    captured.know(magnitudes=magnitudes(captured, inputs), offsets=offsets(captured, inputs), **_read_attention(captured))
    captured.factors = factors(captured, inputs)
    captured.know(summands=read_summands(graph, nodes, captured.factors))
    if policy.measure and policy.low is not FP32 and lists.rule == "cost":
        measured = load_extra("measured prices", "measure=").measure(captured)
        kept = f"; {measured.refused} that cannot be made alone keep the table's prices" if measured.refused else ""
        captured.know(timings=measured)
        captured.note(f"prices measured here: {len(measured.ops)} calls of ops, {len(measured.casts)} sizes of casts{kept}")
    if given is not None:
        plan = given

        def match(problem: Problem) -> RegionPlan:
            return match_region(plan, problem)

        captured.match_given = match
        captured.know(given=match(captured.problem))
    return captured


def _asks_of_products(policy: Policy, given: ModelPlan | None) -> bool:
    """True if products may read fp8 copies or be wide (bf16 operands, fp32 result): by the plan `given`, or by `policy` if that is None."""
    if given is None:
        return policy.products is not None or any(override.word == WIDE for override in policy.overrides)
    return any(region.quantised or region.edited(Edit.WIDE_PRODUCT) for region in given.regions)


def clean_exported(module: torch.fx.GraphModule) -> None:
    """Prepare a graph of torch.export for `read_problem`, in place: remove its checks, and inline its `no_grad` subgraphs."""
    run_passes(CLEAN_EXPORTED, Reading(op_lists("default", FP32, "cpu"), FP32, False), EditedGraph(module, {}), "an exported graph")


def _read_attention(captured: Captured, around: Mapping[torch.fx.Node, torch.fx.Node] | None = None) -> dict[str, Any]:
    """Return fields of `Problem` as a dict: edits possible for attention masks, ops that repeat heads, and non-contiguous masks.

    Returns {} if `fold_masks` is "" or the graph has no attention. `around` maps the inputs of a body to the outer nodes passed for them.
    """
    if not captured.problem.fold_masks or not any(node.op == ATTENTION for node in captured.problem.graph):
        return {}
    names, graph = captured.names, captured.module.graph
    masks = {names[call]: edit for call, edit in read_masks(graph, around or {}).items()}
    free = {call: ways for call, ways in read_repeated_heads(graph).items() if names[call] in masks or argument(call, MASK) is None}
    repeated = {names[call]: tuple(names[node] for way in ways for node in (way.whole, way.spread)) for call, ways in free.items()}
    strided = {names[value]: tuple(names[call] for call in calls) for value, calls in read_strided_masks(graph).items()}
    return {"masks": masks, "repeated_heads": repeated, "strided_masks": strided}


def rewrite_graph(captured: Captured) -> tuple[torch.fx.GraphModule, RegionPlan]:
    """Return (edited copy of the captured graph, its plan). The copy has passed a check on fake tensors.

    An op that refuses its planned low-precision inputs stays fp32, and the graph is planned again. The captured graph itself is never
    edited. Raises PassError if the edited graph fails for another reason, PlanError if a given plan cannot run, and the errors of `decide`.
    """
    closed = _rewrite_inner_graphs(captured)
    bodies = _rewrite_bodies(captured)
    for _ in range(MOST_REFUSALS):
        problem = captured.problem
        decisions = decide(problem)
        edited = EditedGraph.of(captured)
        for name, (body, _) in (bodies | closed).items():
            setattr(edited.module, name, body)
        for name, node in edited.nodes.items():
            node.meta[NODE] = name
        plan = decisions.freeze(problem)
        try:
            run_passes(APPLY, plan, edited, problem.name)
            dry_run(edited.module, _expected(problem, decisions, edited))
            _check_outputs(captured.module, edited.module, decisions)
        except Refused as refusal:
            if _leave_bodies(captured, edited, refusal):
                closed = _rewrite_inner_graphs(captured)
            elif not _keep_logical(captured, decisions, edited, refusal):
                _keep_high(captured, decisions, edited, refusal)
            continue
        run_passes(TIDY, plan, edited, problem.name)
        return edited.module, replace(plan, bodies=tuple(body_plan for _, body_plan in (bodies | closed).values()))
    raise PassError(f"{captured.problem.name}: over {MOST_REFUSALS} ops refused low inputs; please report this model")


def _rewrite_bodies(captured: Captured) -> dict[str, tuple[torch.fx.GraphModule, RegionPlan]]:
    """Rewrite the bodies of activation checkpoints. Return {attribute that holds a body: (edited body, its plan)}.

    A body takes fp32 inputs and may return low-precision results. The planner's graph of `captured` then records these results as low.
    """
    bodies: dict[str, tuple[torch.fx.GraphModule, RegionPlan]] = {}
    pinned: dict[str, OpNode] = {}
    read_parts(captured)
    _tell_parts(captured)
    for node, part in captured.parts.items():
        name = part.problem.name
        if captured.match_given is not None:
            part.know(given=captured.match_given(part.problem))
        bodies[name] = rewrite_graph(part)
        given_low = _low_outputs(part, bodies[name][1])
        for vertex in _results_of(captured, node):
            if vertex.carries_fp32 and captured.nodes[vertex.name].args[1] in given_low:
                captured.handed_on.setdefault(vertex.name, vertex)
                pinned[vertex.name] = replace(vertex, pinned=(Colour.LOW, Reason.BODY, name), precision_group="")
            elif vertex.name in captured.handed_on:  # an earlier plan of the body made the result low, but the present plan does not
                pinned[vertex.name] = captured.handed_on.pop(vertex.name)
    if pinned:
        captured.know(graph=captured.problem.graph.exchanged(pinned))
    return bodies


def _rewrite_inner_graphs(captured: Captured) -> dict[str, tuple[torch.fx.GraphModule, RegionPlan]]:
    """Rewrite the bodies of loops, conditions and autograd Functions. Return {attribute that holds a body: (edited body, its plan)}.

    The inputs and results of such a body stay fp32. A body that has FLOPs but cannot be rewritten gets a plan with all nodes in fp32.
    """
    bodies: dict[str, tuple[torch.fx.GraphModule, RegionPlan]] = {}
    for node, name in inner_graphs(captured.module):
        if name in bodies:
            continue
        part = _read_inner_graph(captured, node, name, replace(captured.problem.policy, may_decline=False, products=None))
        scaled = captured.problem.scale_loss or captured.problem.inside_scaled
        narrow = captured.problem.training and captured.problem.policy.low.narrow
        _hear_of_inner_graph(captured, node, part)
        reason = kept_high(node, name, scaled) if scaled or narrow else None
        if reason is not None:
            _leave_high(part, reason, op_name(node.target))
        left = captured.left_bodies.get(name, captured.left_bodies.get("", (Reason.OPAQUE, KEPT.get(op_name(node.target), ""))))
        if not left[1] and part.problem.policy.low.narrow and part.problem.kept_high is None and exchanges_infinities(part):
            left = Reason.OPAQUE, "an op in there gives something finite for an infinity, so that an overflow would not show"
        if not left[1]:
            if captured.match_given is not None:
                part.know(given=captured.match_given(part.problem))
            bodies[name] = rewrite_graph(part)
        elif any(vertex.flops for vertex in part.problem.graph):
            captured.left_bodies[name] = left
            bodies[name] = getattr(captured.module, name), _all_high(part.problem, *left)
    return bodies


def _hear_of_inner_graph(captured: Captured, node: torch.fx.Node, part: Captured) -> None:
    """Record that results of the body `part`, and some of its inputs in the outer graph `captured`, must not be rounded to the low format.

    `node` runs the body: a loop, a condition or an autograd Function. The inputs are those whose error an op in the body would magnify.
    Each result of `node` gets the precision (`Held`) of the most exact result of the body.
    """
    inside, results = held(part.problem), part.results.values()
    part.know(needs_bits=frozenset(results))
    _hear_of_inputs(captured, part)
    known, names = dict(captured.problem.held), captured.names
    for each in (node, *(user for user in node.users if op_name(user.target) == "getitem")):
        if each in names:
            known[names[each]] = min([known.get(names[each], Held.ROUNDED), *(inside[name] for name in results)])
    captured.know(held=known)


def _all_high(problem: Problem, reason: Reason, why: str) -> RegionPlan:
    """Return the plan of a graph that is left in fp32. All its fp32 nodes have the `reason` and the text `why`."""
    decisions = Decisions()
    for node in problem.graph:
        colour = Colour.HIGH if node.carries_fp32 and node.role != "output" else Colour.PLAIN
        decisions.paint(node.name, colour, reason if colour is Colour.HIGH else Reason.NO_FLOAT, detail=why)
    decisions.note(f"{LEFT}{why}")
    return decisions.freeze(problem)


def _leave_bodies(captured: Captured, edited: EditedGraph, refusal: Refused) -> bool:
    """If the op that failed the dry run (`refusal`) runs rewritten subgraphs, mark these to stay fp32 and return True; otherwise False."""
    failed, vertices = edited.names.get(refusal.node), captured.names
    found = [name for node, name in inner_graphs(captured.module) if vertices[node] == failed and name not in captured.left_bodies]
    for name in found:
        captured.left_bodies[name] = Reason.OPAQUE, f"{failed} refused it rewritten: {refusal.why}"
    return bool(found)


def _read_inner_graph(captured: Captured, node: torch.fx.Node, name: str, policy: Policy) -> Captured:
    """Return a copy of the subgraph `name` that `node` runs, with its `Problem`. Its inputs get the magnitudes etc. of outer values."""
    body, _ = copy_graph(getattr(captured.module, name))
    given = operands(node, body)
    for inner, outer in given:
        if "grapharg" in outer.meta:
            inner.meta["grapharg"] = kept_meta(outer.meta)["grapharg"]
    around, outer_of = captured.problem, dict(given)
    counts = [captured.counts.get(outer_of[inner]) if inner in outer_of else None for inner in body.graph.find_nodes(op="placeholder")]
    part = read_problem(
        body, policy, name=name, entry=around.entry, training=around.training, calibration=around.calibration,
        keep_high=around.keep_high, agreed=around.agreed, handed=counts,
    )  # fmt: skip
    inside, outside = part.names, captured.names
    copies = dict(zip(body.graph.find_nodes(op="placeholder"), part.module.graph.find_nodes(op="placeholder"), strict=True))
    pairs = [(inside[copies[inner]], outside.get(outer, "")) for inner, outer in given]
    known = {**part.problem.magnitudes, **_handed_on(around.magnitudes, pairs)}
    part.factors = {**part.factors, **_handed_on(captured.factors, pairs)}
    part.know(
        magnitudes=known, held=_handed_on(held(around), pairs), inside_scaled=around.scale_loss or around.inside_scaled,
        summands=read_summands(part.problem.graph, part.nodes, part.factors),
        repeated=frozenset(node.name for node in part.problem.graph if node.role == "input"),
    )  # fmt: skip
    part.match_given, part.given = captured.match_given, dict(pairs)
    if around.kept_high is not None:
        _leave_high(part, *around.kept_high)
    elif part.problem.training and part.problem.policy.low.narrow:
        unread = leads_nowhere(node, name, part.module)
        pin_high(part, Reason.UNREAD, op_name(node.target), {inside[inner] for inner in unread if inner in inside})
    return part


def _handed_on(facts: Mapping[str, T], pairs: Sequence[tuple[str, str]]) -> dict[str, T]:
    """Return {input of a body (subgraph): data of the outer value that is passed to it}. Inputs without data are left out.

    `facts` is {outer value: data, such as its magnitude}. `pairs` are (input of the body, outer value passed to it).
    """
    return {inner: facts[outer] for inner, outer in pairs if outer in facts}


def _leave_high(part: Captured, reason: Reason, what: str) -> None:
    """Force all ops of the body (subgraph) `part` to fp32, except ops already forced. The plan shows `reason` and the outer op `what`."""
    part.know(kept_high=(reason, what))
    pin_high(part, reason, what, {node.name for node in part.problem.graph})
    graph = part.problem.graph
    own = (Reason.HALF, part.problem.policy.low.name)
    if reason is Reason.UNSCALED and any(node.pinned is not None and node.pinned[1:] == own for node in graph):
        part.note(FLUSHES)


def pin_high(part: Captured, reason: Reason, what: str, names: set[str]) -> None:
    """Force the ops `names`, and ops that must share their format, to fp32 unless already forced. The plan shows `reason` and `what`."""
    graph = part.problem.graph
    groups = {node.precision_group for node in graph if node.name in names} - {""}
    free = [node for node in graph if (node.name in names or node.precision_group in groups) and node.role == "op" and node.carries_fp32]
    pinned = {node.name: replace(node, pinned=(Colour.HIGH, reason, what), precision_group="") for node in free if node.pinned is None}
    part.know(graph=graph.exchanged(pinned))


def read_body(captured: Captured, node: torch.fx.Node) -> Captured:
    """Return a copy of the checkpoint body that `node` runs, ready to be planned. Its ops may run low, like those of the graph around it.

    With loss scaling, the checkpoint's gradients may be unscaled in the outer graph (`nodes_outside`). Then the body scales them itself,
    and returns fp32 results. With low results, small gradients would be cast to the low format before the body scales them.
    """
    assert isinstance(node.args[0], torch.fx.Node)
    part = _read_inner_graph(captured, node, str(node.args[0].target), captured.problem.policy)
    apart = captured.problem.scale_loss and node in nodes_outside(captured.module.graph, set())
    part.know(fold_masks=captured.problem.fold_masks, scale_loss=apart)
    inputs = dict(zip(part.module.graph.find_nodes(op="placeholder"), node.args[1:], strict=False))
    part.know(**_read_attention(part, {inner: outer for inner, outer in inputs.items() if isinstance(outer, torch.fx.Node)}))
    found = held(part.problem)
    results = {outer: found[inner] for outer, inner in _results_inside(captured, node, part).items()}
    captured.know(held={**captured.problem.held, **results})
    if not apart and not _written_outside(captured, _results_of(captured, node)):
        _free_outputs(part)
    return part


def _results_of(captured: Captured, node: torch.fx.Node) -> list[OpNode]:
    """Return the op-graph nodes of `captured` that stand for the results of the body (subgraph) that `node` runs."""
    names = captured.names
    return [captured.problem.graph[names[user]] for user in node.users if user in names]


def _results_inside(captured: Captured, node: torch.fx.Node, part: Captured) -> dict[str, str]:
    """Return {name in `captured`: name in the body `part`} for each fp32 result of the body (subgraph) that `node` runs."""
    names = [vertex.name for vertex in _results_of(captured, node) if vertex.carries_fp32]
    places: dict[str, Any] = {name: captured.nodes[name].args[1] for name in names}
    return {name: part.results[place] for name, place in places.items() if place in part.results}


def _tell_parts(captured: Captured) -> None:
    """Record in each checkpoint body which results must be exact, and in the graph around it which of the body's inputs must be exact.

    A value must be exact if an op that reads it, directly or later, would magnify its rounding error.
    """
    for node, part in reversed(captured.parts.items()):
        around = Roundings(captured.problem).magnifies
        part.know(needs_bits=frozenset(inner for outer, inner in _results_inside(captured, node, part).items() if outer in around))
        _tell_parts(part)
        _hear_of_inputs(captured, part)


def _hear_of_inputs(captured: Captured, part: Captured) -> None:
    """Record in `captured` the inputs of the body `part` that must be exact, because an op in the body would magnify their error."""
    inside = Roundings(part.problem).magnifies
    needed = (outer for inner, outer in part.given.items() if inner in inside)
    captured.know(needs_bits=captured.problem.needs_bits.union(needed))


def _written_outside(captured: Captured, results: list[OpNode]) -> bool:
    """True if the graph around a body writes to the body's results in place. The body then returns fp32, as these writes expect."""
    names, ties = {vertex.name for vertex in results}, {vertex.precision_group for vertex in results if vertex.precision_group}
    return any(other.precision_group in ties and other.name not in names for other in captured.problem.graph)


def read_parts(captured: Captured) -> None:
    """Read the checkpoint bodies of a graph into `captured.parts`, and bodies nested in a body into its own `parts`.

    This is done at capture, because the names of nodes derive from metadata that Dynamo soon drops.
    """
    for node in captured.module.graph.nodes:
        if is_checkpoint(node):
            if node not in captured.parts:
                captured.parts[node] = read_body(captured, node)
            read_parts(captured.parts[node])


def _free_outputs(part: Captured) -> None:
    """Allow the body `part` of an activation checkpoint to return its results in either format, the low format or fp32."""
    graph = part.problem.graph
    outputs = [node for node in graph if node.role == "output"]
    freed = {node.name: replace(node, operands=tuple(replace(o, demand=Demand.ANY) for o in node.operands)) for node in outputs}
    part.know(graph=graph.exchanged(freed))


def _low_outputs(part: Captured, plan: RegionPlan) -> set[int]:
    """Return the positions of the results that a checkpoint body returns in the low format; empty if the body must return fp32."""
    if not any(o.demand is Demand.ANY for node in part.problem.graph if node.role == "output" for o in node.operands):
        return set()
    low = {node.name for node in plan.nodes if node.colour is Colour.LOW}
    return {place for place, name in part.results.items() if name in low}


def _check_outputs(original: torch.fx.GraphModule, edited: torch.fx.GraphModule, decisions: Decisions) -> None:
    """Raise Refused if padding changes the shape of a result of the edited graph, because callers must never see padding."""
    if not decisions.pads:
        return
    before, after = (next(n for n in each.graph.nodes if n.op == "output") for each in (original, edited))
    for old, new in zip(before.all_input_nodes, after.all_input_nodes, strict=True):
        if [tuple(t.shape) for t in tensors(example_value(old))] != [tuple(t.shape) for t in tensors(example_value(new))]:
            raise Refused(new, "a result would leave the graph padded")


def _keep_logical(captured: Captured, decisions: Decisions, edited: EditedGraph, refusal: Refused) -> bool:
    """Keep the op that failed the dry run (`refusal`) at its logical (unpadded) sizes: forbid its padding, and return True.

    If the op is unknown, or its padding is forbidden already, forbid all padding. If nothing is padded or a plan is given, return False.
    """
    problem = captured.problem
    if not decisions.pads or problem.given is not None:
        return False
    name = edited.names.get(refusal.node)
    if name is None or name in problem.pad_refused:
        captured.know(pads_off=True)
        captured.note(f"nothing is padded: {name or refusal.node.name} refused padded inputs ({refusal.why})")
    else:
        captured.know(pad_refused={**problem.pad_refused, name: refusal.why})
    return True


def refuse_ops(captured: Captured, refused: Mapping[str, str]) -> None:
    """Keep in fp32 the ops that refused low-precision operands in a call. `refused` maps the name of an op to the text of its error.

    Raises PlanError if the graph of such an op follows a given plan.
    """
    for each in captured.with_parts():
        found = {node.name: refused[node.op] for node in each.problem.graph if node.op in refused}
        if found and each.problem.given is not None:
            name, why = next(iter(found.items()))
            raise PlanError(f"the given plan cannot run: {name} refused: {why}; colour it high")
        each.know(refused={**each.problem.refused, **found})


def _keep_high(captured: Captured, decisions: Decisions, edited: EditedGraph, refusal: Refused) -> None:
    """Record that the op that failed the dry run of the edited graph (`refusal`) must be fp32, so that the next plan keeps it there.

    Raises PassError if the op runs in fp32 already, PlanError if the graph follows a given plan.
    """
    problem, names = captured.problem, edited.names
    name = names.get(refusal.node)
    if problem.given is not None:
        raise PlanError(f"the given plan cannot run: {name or refusal.node.name} refused: {refusal.why}; colour it high") from refusal
    if name is None or decisions.paints[name].colour is not Colour.LOW:
        readers = [names[user] for user in refusal.node.users if user in names] if CAST in refusal.node.meta else []
        raise PassError(f"{problem.name}: {name or refusal.node.name} failed after the rewrite: {refusal.why} {readers}") from refusal
    captured.know(refused={**problem.refused, name: refusal.why})


def _expected(problem: Problem, decisions: Decisions, edited: EditedGraph) -> dict[torch.fx.Node, torch.dtype]:
    """Return {node of the edited graph: planned dtype of its result, low or fp32} for each op with an fp32 result in the captured graph."""
    low = problem.policy.low.dtype
    return {
        edited.nodes[name]: low if painted.colour is Colour.LOW else FP32.dtype
        for name, painted in decisions.paints.items()
        if painted.colour is not Colour.PLAIN and problem.graph[name].role == "op"
    }


def graph_device(module: torch.fx.GraphModule) -> str:
    """Return the device type of the graph: an accelerator if any value is on one, otherwise "cpu"."""
    kinds = {t.device.type for node in module.graph.nodes for t in tensors(example_value(node))}
    return next(iter(sorted(kinds - {"cpu", "meta"})), "cpu")
