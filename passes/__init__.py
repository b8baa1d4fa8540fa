"""The passes, in the order in which they run. Deciding passes make the plan, applying passes edit the fx graph as it says."""

from typing import Any

from amprewrite.graphs.fx.captured import EditedGraph, Reading, Target
from amprewrite.ir.decisions import Decisions
from amprewrite.ir.follow_plan import check_casts
from amprewrite.ir.pass_base import Pass, run_passes
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.ir.problem import Problem
from amprewrite.passes.apply.fold_masks import FoldMasks
from amprewrite.passes.apply.insert_casts import InsertCasts
from amprewrite.passes.apply.insert_norm_weights import InsertNormWeights
from amprewrite.passes.apply.insert_pads import InsertPads
from amprewrite.passes.apply.insert_products import InsertProducts
from amprewrite.passes.apply.keep_views import KeepViews
from amprewrite.passes.apply.pad_apart import PadApart
from amprewrite.passes.apply.scale_loss import ScaleLoss
from amprewrite.passes.apply.spread_copies import SpreadCopies
from amprewrite.passes.lower.hoist_weight_casts import HoistWeightCasts
from amprewrite.passes.lower.keep_constants import KeepConstants
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
from amprewrite.passes.plan.plan_clamps import PlanClamps
from amprewrite.passes.plan.plan_constants import PlanConstants
from amprewrite.passes.plan.plan_gradient_blocks import PlanGradientBlocks
from amprewrite.passes.plan.plan_kernel_needs import PlanKernelNeeds
from amprewrite.passes.plan.plan_masks import PlanMasks
from amprewrite.passes.plan.plan_pads import PlanPads
from amprewrite.passes.plan.plan_products import PlanProducts
from amprewrite.passes.plan.weigh_plans import WeighPlans
from amprewrite.passes.repaint.decline_small_graphs import DeclineSmallGraphs
from amprewrite.passes.repaint.repaint_as_autocast import RepaintAsAutocast
from amprewrite.passes.repaint.repaint_by_cost import RepaintByCost
from amprewrite.passes.repaint.repaint_by_error import RepaintByError
from amprewrite.passes.repaint.repaint_by_range import RepaintByRange
from amprewrite.passes.repaint.repaint_counts import RepaintCounts
from amprewrite.passes.repaint.repaint_read_by_many import RepaintReadByMany
from amprewrite.passes.repaint.repaint_shares import RepaintShares
from amprewrite.passes.repaint.repaint_small_steps import RepaintSmallSteps

Deciding = Pass[Problem, Decisions]
Applying = Pass[RegionPlan, EditedGraph]

Normalising = Pass[Reading, EditedGraph]
Lowering = Pass[Target, EditedGraph]

CLEAN_EXPORTED: tuple[Normalising, ...] = (
    StripChecks(),  # remove torch.export's dtype checks and guards
    OpenGradRegions(),  # inline no_grad sub-graphs
)
NORMALISE: tuple[Normalising, ...] = (
    FreeBackwards(),  # give backward code of the user the grad mode of its caller, so that it can be differentiated
    RestoreHooks(),  # turn hooks on tensors into calls that run on fake tensors, too
    FollowWrites(),  # rename values after a write in place to the result of that write
    FusePatterns(),  # fuse norms, softmax and GELU written out by hand into one op each
    MarkLeaving(),  # give each value that leaves the graph itself one place for its cast
)
EVIDENCE: tuple[Deciding, ...] = (
    RepaintByRange(),  # fp16: keep high the values its range cannot hold, by calibration and by weights
    RepaintByError(),  # keep high the ops that a search for an accuracy found
)
PLAN: tuple[Deciding, ...] = (
    PlanCasts(),  # one cast wherever two colours meet, and several copies of values with many readers in training
    PlanConstants(),  # store constants of an ONNX file in the format in which they are read
    PlanPads(),  # round dims up for Tensor Cores, and place the pads and slices that remain
    PlanProducts(),  # choose the low products that read fp8 copies of their operands, in each direction
    PlanClamps(),  # clamp constants beyond the low range
    PlanKernelNeeds(),  # on a CPU: fp32 statistics for norms without weights, separate pads for convolutions
    PlanGradientBlocks(),  # group weights that share an autograd node in training
    PlanMasks(),  # drop masks that are causal or allow all positions, which models skip themselves when they are not captured
)
KEEP = (RepaintCounts(), RepaintSmallSteps(), RepaintAsAutocast(), RepaintShares(), RepaintReadByMany())
"""Passes that keep in fp32 values that torch.autocast would not round, whatever their price."""
BEFORE_COST = (PaintLists(), PaintAgreed(), PaintAfterDeny(), PaintTies(), *EVIDENCE, *KEEP)
BY_COST = (*BEFORE_COST, RepaintByCost(), DeclineSmallGraphs())
"""The passes that choose colours by prices."""
PIPELINES: dict[str, tuple[Deciding, ...]] = {
    "cost": (*BY_COST, *PLAN),
    "tf": (PaintLists(), PaintAgreed(), PaintAfterDeny(past_bounded=True), PaintTies(), *EVIDENCE, PaintTF(), *PLAN),
    "autocast": (PaintLists(), PaintAgreed(), PaintTies(), *EVIDENCE, PaintAutocast(), *PLAN),
    "all-low": (PaintLists(), PaintAgreed(), PaintTies(), *EVIDENCE, RepaintShares(), PaintAllLow(), *PLAN),
    "given": (PaintAsGiven(), *PLAN),
}
"""The deciding passes by the rule of the op lists; "given" follows an existing plan."""
WEIGH: tuple[Deciding, ...] = (
    WeighPlans(BY_COST),  # once a plan has passed its checks: price it against plans by painting rules
)
APPLY: tuple[Applying, ...] = (
    InsertCasts(),  # edit the graph as the plan says
    InsertPads(),  # change sizes where padded regions begin and end; weights are padded by their casts
    SpreadCopies(),  # give a value with many readers several low copies, padded or not
    PadApart(),  # a separate pad for the convolutions that the plan names
    InsertNormWeights(),  # fp32 weights of one for the norms that the plan names
    ScaleLoss(),  # training with a loss scale: gradients enter times the scale and leave divided by it
    FoldMasks(),  # remove the masks from the attention calls that the plan names
    InsertProducts(),  # products that the plan names read fp8 copies, one for all readers of a value
    KeepViews(),  # a result that is a view in fp32 is returned as one
)
TIDY: tuple[Applying, ...] = (
    Tidy(),  # erase conversions that the casts made idle; it needs the facts of the dry run
)
LOWER: tuple[Lowering, ...] = (
    RestoreCheckpoints(),  # without a compiler, activation checkpoints free memory by torch.utils.checkpoint
    HoistWeightCasts(),  # with a weight cache, one launch casts many weights
    ReadFrozenWeights(),  # frozen weights enter in the format in which they are stored
    SuitCompiler(),  # for a compiler: sources of inputs, and low values that are kept and returned low
    SplitLosses(),  # without a compiler, compute a loss of many low logits in parts
    KeepConstants(),  # without a compiler, compute integers and booleans that depend on no input once
)


def stages() -> dict[str, tuple[Pass[Any, Any], ...]]:
    """All passes by stage, in the order in which they run; each once, even if it is in several pipelines."""
    deciding = dict.fromkeys(each for passes in PIPELINES.values() for each in passes)
    by_name: dict[str, Deciding] = {}
    for each in deciding:
        by_name.setdefault(each.name, each)
    of = {stage: tuple(p for p in by_name.values() if f".{stage}." in type(p).__module__) for stage in ("paint", "repaint", "plan")}
    return {
        "normalise": (*CLEAN_EXPORTED, *NORMALISE), **of, "plan": (*of["plan"], *WEIGH), "apply": (*APPLY, *TIDY), "lower": LOWER
    }  # fmt: skip


def pipeline(problem: Problem) -> tuple[Deciding, ...]:
    """The passes that decide this problem."""
    return PIPELINES["given" if problem.given is not None else problem.lists.rule]


def decide(problem: Problem) -> Decisions:
    """Decide one graph: colours, casts, pads. Edits nothing.

    Raises PlanError if a given plan does not fit, PolicyError if overrides contradict each other, PassError if a pass fails.
    """
    decisions = Decisions()
    run_passes(pipeline(problem), problem, decisions, problem.name)
    if problem.given is not None:
        check_casts(problem.given, decisions.casts)
    return decisions


def plan_region(problem: Problem) -> RegionPlan:
    """The plan of one graph, as `decide` makes it."""
    return decide(problem).freeze(problem)


__all__ = [
    "APPLY", "CLEAN_EXPORTED", "LOWER", "NORMALISE", "PIPELINES", "PLAN", "TIDY", "WEIGH", "Deciding", "decide", "pipeline", "plan_region",
    "stages",
]  # fmt: skip
