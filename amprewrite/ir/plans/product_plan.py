"""The part of a plan about fp8: which GEMMs of low matrix products read fp8 copies of their operands, and which copies are made."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import Self

from amprewrite.tables.errors import PlanError
from amprewrite.tables.formats import FP8, RECIPES


class ProductReason(Enum):
    """Why a GEMM runs in fp8 or not; the text completes the sentence "GEMM runs in FORMAT because …"."""

    PAYS = "fp8 saves more than its copies cost"
    COSTS = "its copies would cost more than fp8 saves"
    WAITS = "without a compiler the host takes longer for its copies than the device takes for it in bf16"
    ANY_PRICE = "the preset asks for fp8 at any price"
    ASKED = "products= asks for it"
    RECIPE = "the recipe leaves it in bf16"
    UNALIGNED = "fp8 kernels want both dims of the weight to be multiples of 16"
    SCORES = "its result leaves the graph, or only ops that need fp32 read it, as they read logits"
    CHOOSES = "something is chosen by its result, as experts are by a router"
    NO_UNITS = "the device multiplies no fp8"
    AGREED = "it runs so in another graph of the model"
    IN_PLAN = "the given plan says so"


@dataclass(frozen=True)
class GemmPlan:
    """One of the three GEMMs of a matrix product (one in the forward, two in the backward): the formats of its operands, and the reason."""

    gemm: str
    """"out" (the forward), "grad_in" or "grad_weight" (the gradients of the two operands)."""
    formats: str
    """Formats of the two operands of the GEMM, such as "e5m2 x e4m3"; the low format, such as "bf16", if it reads no fp8 copies."""
    reason: ProductReason
    """Why the GEMM reads these formats. In JSON, the name of a member of `amprewrite.ir.plans.product_plan.ProductReason`."""
    detail: str = ""
    """A detail of the reason, such as the rule of `products=` that asked for the format, the sizes of the GEMM, or the node that is the
    cause; "" if there is none."""

    @property
    def fp8(self) -> bool:
        """True if the GEMM reads fp8 copies of its operands."""
        return " x " in self.formats

    def __str__(self) -> str:
        return f"{self.gemm} {self.formats}"

    def why(self) -> str:
        """Return the reason in words, followed in brackets by the detail, if any."""
        return f"{self.reason.value} ({self.detail})" if self.detail else self.reason.value


@dataclass(frozen=True)
class ProductPlan:
    """A matrix product in the low format, with a decision for each of its GEMMs whether it runs in fp8."""

    node: str
    """Name of the product."""
    gemms: tuple[GemmPlan, ...]
    """The GEMMs of this product that the graph runs; only "out" without gradients."""

    def takes(self, gemm: str) -> bool:
        """True if the GEMM called `gemm` runs in fp8."""
        return any(each.gemm == gemm and each.fp8 for each in self.gemms)

    @property
    def fp8(self) -> bool:
        """True if any GEMM of this product runs in fp8."""
        return any(each.fp8 for each in self.gemms)

    def __str__(self) -> str:
        together = groupby(self.gemms, key=lambda each: (each.reason, each.detail if each.reason is ProductReason.ASKED else ""))
        parts = []
        for (reason, _), gemms in ((key, list(group)) for key, group in together):
            why = gemms[0].why() if len({each.detail for each in gemms}) == 1 else reason.value
            parts.append(f"{', '.join(map(str, gemms))} because {why}")
        return f"{self.node}: " + "; ".join(parts)


@dataclass(frozen=True)
class QuantisedCopy:
    """One fp8 copy of a value, made once for all GEMMs that read it."""

    value: str
    """Name of a node. The copy is of the node's result or, if `role` is "g", of the gradient of its result."""
    to: str
    """Format name: "e4m3" or "e5m2"."""
    scales: str
    """"tensor" if the copy has a single scale; "rows" or "columns" if each row or column of the value, seen as a matrix, has a scale."""
    readers: tuple[str, ...]
    """GEMMs that read the copy, such as "linear_3.grad_weight"."""
    role: str
    """"x" or "w" if the copy is of the first or second operand of products x · wᵀ (see `tables/formats.py`), "g" if it is of the gradient
    of a product's result."""
    kept: bool = False
    """Whether the backward reads the copy. The copy is then saved for backward in place of the value."""
    weight: bool = False
    """Whether the value is a parameter, or a view of a parameter."""
    write_version: int = 0
    """Version of the value that is copied: each in-place write to its memory makes a new version, and so does a change of the grad mode."""
    largest: float | None = None
    """Largest magnitude of the value in sample batches, which gives a constant scale; None if the graph computes the scale in each call."""

    def __str__(self) -> str:
        readers = ", ".join(self.readers[:4]) + (f" and {len(self.readers) - 4} more" if len(self.readers) > 4 else "")
        value = f"gradient of {self.value}" if self.role == "g" else self.value
        scale = "" if self.scales == "tensor" else f" by {self.scales}"
        scale += "" if self.largest is None else f" with a constant scale, for values up to {self.largest:.3g},"
        return f"{value} -> {self.to}{scale} for {readers}" + ", kept for backward" * self.kept


@dataclass(frozen=True)
class QuantisedProducts:
    """All decisions about fp8 in the plan of one graph. It is empty if fp8 was considered for no product, as without `products=`."""

    recipe: str = ""
    """Name of the fp8 recipe (`RECIPES` of `tables/formats.py`), which says which GEMMs may run in fp8; "" if there are no products."""
    products: tuple[ProductPlan, ...] = ()
    """The matrix products in the low format for which fp8 was considered, with a decision for each of their GEMMs."""
    copies: tuple[QuantisedCopy, ...] = ()
    """The fp8 copies. They can be computed from `products`, so that a plan edited by hand may list none."""

    def __bool__(self) -> bool:
        return bool(self.products)

    @property
    def chosen(self) -> Iterator[ProductPlan]:
        """The products of which at least one GEMM runs in fp8."""
        return (each for each in self.products if each.fp8)

    def of(self, node: str) -> ProductPlan | None:
        """Return the plan of the product called `node`, with the format of each GEMM; None if fp8 was not considered for it."""
        return next((each for each in self.products if each.node == node), None)

    def edited(self, node: str, gemm: str, word: str) -> Self:
        """Return a copy in which the GEMM `gemm` of the product `node` runs in the format `word`: "fp8" or the low format.

        If `gemm` is "", all GEMMs of the product are changed, except GEMMs that the plan's fp8 recipe keeps in the low format. The result
        lists no fp8 copies; they are decided anew when the plan is applied. Raises PlanError if the product has no such GEMM, or if `word`
        is "fp8" and the recipe keeps this GEMM in the low format.
        """
        recipe, found, fp8 = RECIPES[self.recipe], self.of(node), word == FP8
        assert found is not None
        wrong = [each.gemm for each in found.gemms if gemm == each.gemm and fp8 and gemm not in recipe.gemms]
        if wrong or (gemm and all(each.gemm != gemm for each in found.gemms)):
            why = f"the recipe of this plan ({recipe.name}) leaves it in bf16" if wrong else "its graph has no such GEMM"
            raise PlanError(f"{node}.{gemm} cannot be edited: {why}")
        changed = tuple(
            GemmPlan(each.gemm, recipe.pair(each.gemm) if fp8 else word, ProductReason.IN_PLAN)
            if gemm in ("", each.gemm) and (each.gemm in recipe.gemms or not fp8)
            else each
            for each in found.gemms
        )
        products = tuple(replace(each, gemms=changed) if each.node == node else each for each in self.products)
        return replace(self, products=products, copies=())

    def without(self, nodes: Set[str]) -> Self:
        """Return a copy without the products called `nodes`, and without the fp8 copies that only these products read."""
        products = tuple(each for each in self.products if each.node not in nodes)
        readers = {each: tuple(r for r in each.readers if r.rpartition(".")[0] not in nodes) for each in self.copies}
        copies = tuple(replace(each, readers=left) for each, left in readers.items() if left)
        return replace(self, recipe=self.recipe if products else "", products=products, copies=copies)

    def about(self, node: str) -> list[str]:
        """Return lines about the node `node`: the formats of its GEMMs, and fp8 copies of its result or of its gradient; [] if none."""
        found = self.of(node)
        lines = [f"  its {each.gemm} runs in {each.formats} because {each.why()}" for each in found.gemms] if found else []
        return lines + [f"  it is quantised: {each}" for each in self.copies if each.value == node]
