"""The pipeline: deciding passes read the op graph and write the plan, applying passes edit the fx graph as the plan says."""

from amprewrite.ir.pass_base import Pass
from amprewrite.passes.apply.fold_masks import FoldMasks
from amprewrite.passes.apply.insert_casts import InsertCasts
from amprewrite.passes.apply.insert_ones import InsertOnes
from amprewrite.passes.apply.insert_pads import InsertPads
from amprewrite.passes.apply.scale_loss import ScaleLoss
from amprewrite.passes.paint.paint import Paint
from amprewrite.passes.paint.paint_force import PaintForce
from amprewrite.passes.paint.paint_local import PaintLocal
from amprewrite.passes.paint.paint_tf import PaintTF
from amprewrite.passes.plan.plan_casts import PlanCasts
from amprewrite.passes.plan.plan_pads import PlanPads
from amprewrite.passes.plan.weigh_plans import WeighPlans
from amprewrite.passes.repaint.repaint_by_cost import RepaintByCost
from amprewrite.passes.repaint.repaint_by_error import RepaintByError
from amprewrite.passes.repaint.repaint_by_range import RepaintByRange
from amprewrite.passes.repaint.repaint_small import RepaintSmall

DECIDE: tuple[Pass, ...] = (
    Paint(),  # what facts, overrides and lists decide; deny flows downstream
    RepaintByRange(),  # fp16: what its range cannot hold stays high, by calibration and by weights
    RepaintByError(),  # what a search for an accuracy keeps high
    PaintTF(),  # lists="tf": TensorFlow's remaining rules
    PaintLocal(),  # lists="autocast": op by op, as torch.autocast does at run time
    PaintForce(),  # lists="o2", "o3": everything else low
    RepaintByCost(),  # lists="default": what is open goes where casts and bytes cost least
    RepaintSmall(),  # dtype=None: a graph that is too small to gain stays fp32
    PlanCasts(),  # one cast wherever two colours meet
    PlanPads(),  # which dims are rounded up for Tensor Cores, and where real pads and slices remain
)

WEIGH: tuple[Pass, ...] = (
    WeighPlans(),  # once a plan has come through: price it beside those that painting rules would have made
)

APPLY: tuple[Pass, ...] = (
    InsertCasts(),  # edit the graph as the plan says
    InsertPads(),  # change sizes where padded regions begin and end; weights are padded by their casts
    InsertOnes(),  # a CPU's norms without weights keep their statistics in fp32, as others do
    ScaleLoss(),  # training with a loss scale: gradients enter times the scale and leave divided by it
    FoldMasks(),  # attention goes without a mask that says nothing, as it would uncaptured
)

__all__ = ["APPLY", "DECIDE", "WEIGH"]
