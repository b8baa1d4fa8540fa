"""Split the low copy of each value that the plan names into several copies, one for every two readers.

    before   to = x.to(bfloat16); a(to); b(to); c(to); d(to); ...
    after    to = x.to(bfloat16); a(to); b(to); to_1 = x.to(bfloat16); c(to_1); d(to_1); ...

Autograd adds the gradients of the readers of one copy in the low format, and the gradients of the copies in fp32. `plan-casts` decides
which values need several copies.
"""

from __future__ import annotations

import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.graphs.fx.ops.pad_ops import resize
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.passes.apply.insert_casts import CAST
from amprewrite.tables.formats import FP32
from amprewrite.tables.vocabulary import Edit

READERS = 2
"""Number of readers of one copy. The sum of two gradients is rounded only once."""


class SpreadCopies(Pass[RegionPlan, EditedGraph]):
    def __call__(self, plan: RegionPlan, edited: EditedGraph) -> None:
        copies = [copy for name in plan.edited(Edit.SPREAD_COPIES) for copy in edited.nodes[name].users if _is_low(copy)]
        for copy in copies:
            for padded in [reader for reader in copy.users if reader.target is resize]:
                spread(padded)
            spread(copy)


def _is_low(copy: torch.fx.Node) -> bool:
    """True if a node is a cast to a low format that the rewrite inserted."""
    return copy.meta.get(CAST, FP32.name) != FP32.name


def spread(copy: torch.fx.Node) -> None:
    """Keep the first READERS readers of a copy, and give every READERS further readers a new copy."""
    readers = sorted(copy.users)
    for start in range(READERS, len(readers), READERS):
        another = _another(copy)
        for reader in readers[start : start + READERS]:
            reader.replace_input_with(copy, another)


def _another(copy: torch.fx.Node) -> torch.fx.Node:
    """Insert a second node that makes the same copy, and return it. If the copy is padded, its unpadded source is copied, too."""
    source = copy.args[0]
    again = {source: _another(source)} if copy.target is resize and isinstance(source, torch.fx.Node) else {}
    with copy.graph.inserting_after(copy):
        return copy.graph.node_copy(copy, lambda node: again.get(node, node))
