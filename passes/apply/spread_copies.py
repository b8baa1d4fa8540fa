"""Divide the readers of a low-precision copy into groups, each with its own autograd node, for each value that the plan names.

    before   to = x.to(bfloat16); a(to); b(to); c(to); d(to); ...
    after    to = x.to(bfloat16); a(to); b(to); copy = linked_copy(x, bfloat16, (), to); c(copy); d(copy); ...

Autograd adds the gradients of the readers in one group in the low format, and the gradients of the groups in fp32. All groups read the same
memory. The node of a group is inserted before the first reader of the group. So its backward runs as soon as the backwards of the group
have run, and no gradient waits for other groups.
`plan-casts` decides which values need groups.
"""

from __future__ import annotations

import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.graphs.fx.flow.kernel_pins import MOST_READERS
from amprewrite.graphs.fx.node_facts import Openings, outside, transform_openings
from amprewrite.graphs.fx.ops.pad_ops import linked_copy, pad_cast, resize
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.passes.apply.insert_casts import CAST
from amprewrite.tables.formats import FP32
from amprewrite.tables.vocabulary import Edit

READERS = 2
"""Number of readers in a group, for values other than weights. torch.autocast casts such a value anew for each reader, so that all sums of
gradients are fp32. A group of two rounds one sum to the low format. Weights have groups of MOST_READERS, because torch.autocast keeps one
copy of a weight for all its readers, and each further group takes time in every backward."""


class SpreadCopies(Pass[RegionPlan, EditedGraph]):
    needs = ("edits",)

    def __call__(self, plan: RegionPlan, edited: EditedGraph) -> None:
        openings = transform_openings(edited.module.graph)
        copies = [copy for name in plan.edited(Edit.SPREAD_COPIES) for copy in edited.nodes[name].users if _is_low(copy)]
        for copy in copies:
            for padded in [reader for reader in copy.users if reader.target is resize]:
                spread(padded, openings)
            spread(copy, openings)


def _is_low(copy: torch.fx.Node) -> bool:
    """True if a node is a cast to a low format that the rewrite inserted."""
    return copy.meta.get(CAST, FP32.name) != FP32.name


def spread(copy: torch.fx.Node, openings: Openings) -> None:
    """Divide the readers of `copy`, a low-precision copy, into groups. The first group reads `copy`, each other group a `linked_copy`.

    A `linked_copy` has the memory of `copy`, but its own autograd node.
    """
    readers = sorted(user for user in copy.users if user.target is not linked_copy)
    size = MOST_READERS if copy.meta.get("weight") else READERS
    for start in range(size, len(readers), size):
        group = readers[start : start + size]
        with copy.graph.inserting_before(outside(openings, copy, group[0])):
            linked = _linked(copy)
        for reader in group:
            reader.replace_input_with(copy, linked)


def _linked(copy: torch.fx.Node) -> torch.fx.Node:
    """Insert and return a node with the data of the low-precision `copy`, but an autograd node of its own that leads to the copied value.

    The node shares the memory of `copy`. If `copy` pads another low-precision copy, make such a node for that copy, and pad it again.
    """
    source = copy.args[0]
    if copy.target is resize and isinstance(source, torch.fx.Node):
        again = _linked(source)
        return copy.graph.node_copy(copy, lambda node: again if node is source else node)
    layout = copy.args[2] if copy.target is pad_cast else ()
    linked = copy.graph.call_function(linked_copy, (source, copy.args[1], layout, copy))
    linked.meta = dict(copy.meta)
    return linked
