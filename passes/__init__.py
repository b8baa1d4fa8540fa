"""The passes, in the order in which they run. Normalising passes prepare the captured fx graph. Deciding passes plan the format of each op,
casts and padding. Applying passes edit the graph as planned. Lowering passes prepare it for the call, with or without a compiler."""

from typing import Any

from amprewrite.graphs.fx.captured import EditedGraph, Reading, Target
from amprewrite.ir.follow_plan import check_casts
from amprewrite.ir.pass_base import Decisions, Pass, Problem, run_passes
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.passes.apply.fold_masks import FoldMasks
from amprewrite.passes.apply.insert_casts import InsertCasts
from amprewrite.passes.apply.insert_pads import InsertPads
from amprewrite.passes.apply.insert_products import InsertProducts
from amprewrite.passes.apply.keep_views import KeepViews
from amprewrite.passes.apply.scale_loss import ScaleLoss
from amprewrite.passes.apply.spread_copies import SpreadCopies
from amprewrite.passes.apply.suit_kernels import SuitKernels
from amprewrite.passes.lower.group_weights import GroupWeights
from amprewrite.passes.lower.hoist_weight_casts import HoistWeightCasts
from amprewrite.passes.lower.keep_constants import KeepConstants
from amprewrite.passes.lower.keep_quantised import KeepQuantised
from amprewrite.passes.lower.read_frozen_weights import ReadFrozenWeights
from amprewrite.passes.lower.restore_checkpoints import RestoreCheckpoints
from amprewrite.passes.lower.split_losses import SplitLosses
from amprewrite.passes.lower.suit_compiler import SuitCompiler
from amprewrite.passes.lower.tidy import Tidy
from amprewrite.passes.normalise.follow_writes import FollowWrites
from amprewrite.passes.normalise.free_backwards import FreeBackwards
from amprewrite.passes.normalise.fuse_patterns import FusePatterns
from amprewrite.passes.normalise.mark_leaving import MarkLeaving
from amprewrite.passes.normalise.open_grad_regions import OpenGradRegions
from amprewrite.passes.normalise.part_summands import PartSummands
from amprewrite.passes.normalise.restore_hooks import RestoreHooks
from amprewrite.passes.normalise.strip_checks import StripChecks
from amprewrite.passes.paint.paint_after_deny import PaintAfterDeny
from amprewrite.passes.paint.paint_agreed import PaintAgreed
from amprewrite.passes.paint.paint_all_low import PaintAllLow
from amprewrite.passes.paint.paint_as_given import PaintAsGiven
from amprewrite.passes.paint.paint_autocast import PaintAutocast
from amprewrite.passes.paint.paint_lists import PaintLists
from amprewrite.passes.paint.paint_tf import PaintTF
from amprewrite.passes.paint.paint_ties import PaintTies
from amprewrite.passes.plan.plan_casts import PlanCasts
from amprewrite.passes.plan.plan_edits import PlanEdits
from amprewrite.passes.plan.plan_masks import PlanMasks
from amprewrite.passes.plan.plan_pads import PlanPads
from amprewrite.passes.plan.plan_products import PlanProducts
from amprewrite.passes.repaint.decline_small_graphs import DeclineSmallGraphs
from amprewrite.passes.repaint.repaint_as_autocast import RepaintAsAutocast
from amprewrite.passes.repaint.repaint_by_cost import RepaintByCost
from amprewrite.passes.repaint.repaint_by_error import RepaintByError
from amprewrite.passes.repaint.repaint_by_range import RepaintByRange
from amprewrite.passes.repaint.repaint_counts import RepaintCounts
from amprewrite.passes.repaint.repaint_shares import RepaintShares
from amprewrite.passes.repaint.repaint_small_steps import RepaintSmallSteps

Deciding = Pass[Problem, Decisions]
Applying = Pass[RegionPlan, EditedGraph]

Normalising = Pass[Reading, EditedGraph]
Lowering = Pass[Target, EditedGraph]

CLEAN_EXPORTED: tuple[Normalising, ...] = (
    StripChecks(),  # remove torch.export's guards and its dtype checks, which would fail on low values
    OpenGradRegions(),  # inline no_grad subgraphs and marked regions, so that the passes below see every op
)
NORMALISE: tuple[Normalising, ...] = (
    FreeBackwards(),  # run the backward of an autograd Function in the grad mode of its caller, so that this backward can be differentiated
    RestoreHooks(),  # replace Dynamo's op for hooks on tensors, which fails on fake tensors
    FollowWrites(),  # let nodes after an in-place op read the op's result, so that the op may write to a cast copy
    PartSummands(),  # split baddbmm and addmm if the summand holds whole numbers, such as positions: only the sum must then stay fp32
    FusePatterns(),  # replace each norm, softmax or GELU that is written out in several ops by one op, whose kernel computes in fp32 inside
    MarkLeaving(),  # convert each returned value that has other readers or shares memory by a no-op: all its readers share one cast
)
EVIDENCE: tuple[Deciding, ...] = (
    RepaintByRange(),  # keep in fp32 the values that the low format cannot hold, as calibration, weights and constants show
    RepaintByError(),  # keep in fp32 the ops that the accuracy search (`tolerance=`) found too inexact in the low format
)
PLAN: tuple[Deciding, ...] = (
    PlanCasts(),  # plan a cast where an op reads a value of the other format; in training, one for each group of many readers
    PlanPads(),  # choose the dims to round up for Tensor Cores, and the places of the pads and slices for these dims
    PlanProducts(),  # choose the products, forward and backward, that read fp8 copies of their operands, where that saves time
    PlanEdits(),  # clamp constants that become infinities in low ops, and change low ops whose kernels give inexact results or gradients
    PlanMasks(),  # drop attention masks that are causal or allow all positions, skip repeated heads, copy masks that fused kernels refuse
)
KEEP = (RepaintCounts(), RepaintSmallSteps(), RepaintAsAutocast(), RepaintShares())
"""Passes that keep values in fp32, whatever that costs in time. Most of these values are fp32 under torch.autocast, too."""
BEFORE_COST = (PaintLists(), PaintAgreed(), PaintAfterDeny(), PaintTies(), *EVIDENCE, *KEEP)
BY_COST = (*BEFORE_COST, RepaintByCost(), DeclineSmallGraphs())
"""The passes that choose colours (low or high) by prices, and all passes before them."""
PIPELINES: dict[str, tuple[Deciding, ...]] = {
    "cost": (*BY_COST, *PLAN),
    "tf": (PaintLists(), PaintAgreed(), PaintAfterDeny(past_bounded=True), PaintTies(), *EVIDENCE, PaintTF(), *PLAN),
    "autocast": (PaintLists(), PaintAgreed(), PaintTies(), *EVIDENCE, PaintAutocast(), *PLAN),
    "all-low": (PaintLists(), PaintAgreed(), PaintTies(), *EVIDENCE, RepaintShares(), PaintAllLow(), *PLAN),
    "given": (PaintAsGiven(), *PLAN),
}
"""{rule of the op lists (`OpLists.rule`): deciding passes that choose formats by this rule}. "given" makes a graph follow a given plan."""
APPLY: tuple[Applying, ...] = (
    InsertCasts(),  # insert casts, and set dtype arguments to the planned formats; first, because the passes below change these casts
    InsertPads(),  # insert a pad where a padded region begins and a slice where it ends; casts of weights pad the weights
    SpreadCopies(),  # if many ops read one value, such as a weight of a recurrent cell, let autograd add up its gradients in fp32
    SuitKernels(),  # change low norms, convolutions and recurrent layers whose own kernels would give inexact results or wrong gradients
    ScaleLoss(),  # with a loss scale, scale gradients that enter the graph, so that small ones do not vanish; unscale gradients that leave
    FoldMasks(),  # edit the attention calls that the plan names: drop masks, skip repeated heads, read contiguous copies of masks
    InsertProducts(),  # let the products that the plan names read fp8 copies of their operands; all readers of a value share its copies
    KeepViews(),  # return a result as a view if the fp32 graph returns a view, because autograd treats views differently
)
TIDY: tuple[Applying, ...] = (
    Tidy(),  # erase conversions that became no-ops; this needs the example values that the dry run computed
)
LOWER: tuple[Lowering, ...] = (
    RestoreCheckpoints(),  # without a compiler, call torch.utils.checkpoint for activation checkpoints, so that they free memory
    HoistWeightCasts(),  # with a weight cache, read low copies that are kept between calls, so that later calls cast no weight
    ReadFrozenWeights(),  # pass the low values that frozen weights (`freeze`) are stored as to the graph, so that it casts nothing
    KeepQuantised(),  # keep fp8 copies of weights as long as their low copies are kept, so that later calls quantise no weight
    SuitCompiler(),  # for a compiler, record where each input comes from, and let autograd save low values for backward, not fp32 copies
    SplitLosses(),  # without a compiler, compute a loss of many low logits in parts, to save the memory of their fp32 copy
    KeepConstants(),  # without a compiler, compute only once the integers and booleans that depend on no input
    GroupWeights(),  # without a compiler, cast many small weights and their gradients together, which saves launches and Python code
)


def stages() -> dict[str, tuple[Pass[Any, Any], ...]]:
    """Return {stage, such as "repaint": its passes in the order in which they run}. A pass of several pipelines is listed once."""
    deciding = dict.fromkeys(each for passes in PIPELINES.values() for each in passes)
    by_name: dict[str, Deciding] = {}
    for each in deciding:
        by_name.setdefault(each.name, each)
    of = {stage: tuple(p for p in by_name.values() if f".{stage}." in type(p).__module__) for stage in ("paint", "repaint", "plan")}
    return {"normalise": (*CLEAN_EXPORTED, *NORMALISE), **of, "apply": (*APPLY, *TIDY), "lower": LOWER}


def pipeline(problem: Problem) -> tuple[Deciding, ...]:
    """Return the deciding passes: `PIPELINES["given"]` if `problem` has a plan to follow, otherwise those for the rule of its op lists."""
    return PIPELINES["given" if problem.given is not None else problem.lists.rule]


def decide(problem: Problem) -> Decisions:
    """Run the deciding passes on `problem` and return their decisions: colours (low or high), casts, pads and other edits.

    Raises PlanError if a given plan does not fit, PolicyError if overrides contradict each other, PassError if a pass fails.
    """
    decisions = Decisions()
    run_passes(pipeline(problem), problem, decisions, problem.name)
    if problem.given is not None:
        check_casts(problem.given, decisions.casts)
    return decisions


def plan_region(problem: Problem) -> RegionPlan:
    """Return the plan of one graph, an immutable record of the decisions of `decide`. Raises the errors of `decide`."""
    return decide(problem).freeze(problem)


__all__ = [
    "APPLY", "BY_COST", "CLEAN_EXPORTED", "LOWER", "NORMALISE", "PIPELINES", "PLAN", "TIDY", "Deciding", "decide", "pipeline",
    "plan_region", "stages",
]  # fmt: skip
