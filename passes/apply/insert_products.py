"""Let some products read fp8 copies of their operands, and let others multiply bf16 operands to an fp32 result, as the plan says.

    before   y = linear(x, w, bias); z = linear(x, v)
    after    x8 = quantise(x, ...); w8 = quantise(w, ...); y = quantised_product(None, None, bias, x8, w8, ...)
             v8 = quantise(v, ...); z = quantised_product(None, None, None, x8, v8, ...)

A product runs up to three GEMMs: the forward and two in the backward. A value is quantised once, before the first product that reads a
copy of it, in each layout that a GEMM reads. Gradients are quantised in the backward of the product, once for both GEMMs there. The first
two arguments of `quantised_product` are the unquantised operands. They are None for an operand that all GEMMs read in fp8, as here.

Below, x is bf16, and w is fp32. `wide_linear` rounds w to bf16, multiplies, and returns fp32:

    before   y = linear(x.to(fp32), w, bias)
    after    y = wide_linear(x, w, bias)
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.graphs.fx.ops.pad_ops import linked_copy
from amprewrite.graphs.fx.ops.quantised_products import quantise, quantised_product, relinked
from amprewrite.graphs.fx.ops.wide_products import wide_linear
from amprewrite.graphs.fx.read.calls import bias_of, operands, transposes
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.ir.plans.product_plan import ProductPlan
from amprewrite.passes.apply.insert_casts import CAST
from amprewrite.tables.errors import PlanError
from amprewrite.tables.formats import FP32, GEMMS, READS, G, W, X
from amprewrite.tables.vocabulary import Edit

KEPT = ("nn_module_stack", "stack_trace")
"""Keys of a product's `meta` that are copied to the nodes inserted for the product."""


class InsertProducts(Pass[RegionPlan, EditedGraph]):
    needs = ("quantised.products", "edits")

    def __call__(self, plan: RegionPlan, edited: EditedGraph) -> None:
        _ProductInsertion(plan, edited).run()
        for name in plan.edited(Edit.WIDE_PRODUCT):
            _widen(edited.nodes[name])


def _widen(node: torch.fx.Node) -> None:
    """Turn `node` into a product of bf16 operands with an fp32 result. If an operand is a cast to fp32, read the bf16 input of the cast."""
    x, w = (each.args[0] if each.meta.get(CAST) == FP32.name else each for each in operands(node) or ())
    node.op, node.target, node.args, node.kwargs = "call_function", wide_linear, (x, w, bias_of(node), transposes(node)), {}


class _ProductInsertion:
    """Inserts the fp8 copies and products of one plan into the edited graph."""

    def __init__(self, plan: RegionPlan, edited: EditedGraph) -> None:
        self.plan, self.graph, self.nodes = plan.quantised, edited.module.graph, edited.nodes

    def run(self) -> None:
        read: dict[tuple[Any, ...], set[tuple[torch.fx.Node, str]]] = defaultdict(set)
        for copy in self.plan.copies:
            for reader in copy.readers if copy.role != G else ():
                name, _, gemm = reader.rpartition(".")
                node = self.nodes[name]
                value: Any = self._operand(node, copy.role)
                value = value.args[3] if value.target is linked_copy else value  # args[3] is the low copy that shares its memory
                key = (copy.role, copy.write_version, value, copy.role == W and transposes(node), copy.largest)
                read[key].add((node, gemm))
        made: dict[tuple[torch.fx.Node, str], torch.fx.Node] = {}
        for (role, _, value, _, largest), readers in read.items():
            quantised = self._quantise(value, role, readers, largest)
            made |= {(node, role): self._linked(quantised, self._operand(node, role)) for node in sorted({node for node, _ in readers})}
        for product in self.plan.chosen:
            node = self.nodes[product.node]
            self._exchange(node, product, made.get((node, X)), made.get((node, W)))

    def _operand(self, node: torch.fx.Node, role: str) -> torch.fx.Node:
        found = operands(node)
        if found is None:
            raise PlanError(f"the plan quantises the operands of {node.name}, which is no product of rows and a matrix; make the plan anew")
        return found[(X, W).index(role)]

    def _quantise(self, value: torch.fx.Node, role: str, readers: set[tuple[torch.fx.Node, str]], largest: float | None) -> torch.fx.Node:
        first = min(node for node, _ in readers)
        gemms = tuple(each for each in GEMMS if any(gemm == each for _, gemm in readers))
        with self.graph.inserting_before(first):
            args = (value, role, self.plan.recipe, gemms, role == W and transposes(first))
            copy = self.graph.call_function(quantise, args if largest is None else (*args, largest))
        copy.meta = {key: first.meta[key] for key in KEPT if key in first.meta}
        return copy

    def _linked(self, copy: torch.fx.Node, operand: torch.fx.Node) -> torch.fx.Node:
        """Return a node that has the data of the fp8 `copy` and sends gradients to `operand`. Products will read it in place of `operand`.

        If `operand` is a `linked_copy`, it shares the memory of a low copy, but has its own autograd node. The fp8 `copy` was made from the
        low copy and sends gradients to it. So the node is then `relinked(copy, operand)`. Otherwise it is `copy` itself.
        """
        if operand.target is not linked_copy:
            return copy
        made = next((user for user in operand.users if user.target is relinked and user.args[0] is copy), None)
        if made is None:
            with self.graph.inserting_after(max(copy, operand)):
                made = self.graph.call_function(relinked, (copy, operand))
        return made

    def _exchange(self, node: torch.fx.Node, product: ProductPlan, x8: torch.fx.Node | None, w8: torch.fx.Node | None) -> None:
        """Turn `node` into a product that reads the fp8 copies `x8` and `w8` of its operands; None stands for a copy that no GEMM reads."""
        wide = {role for each in product.gemms if not each.fp8 for role, _ in READS[each.gemm]}
        x = self._operand(node, X) if x8 is None or X in wide else None
        w = self._operand(node, W) if w8 is None or W in wide else None
        gemms = tuple(gemm for gemm in GEMMS if product.takes(gemm))
        args = (x, w, bias_of(node), x8, w8, self.plan.recipe, gemms, transposes(node))
        node.op, node.target, node.args, node.kwargs = "call_function", quantised_product, args, {}
