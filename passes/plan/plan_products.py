"""Decide which GEMMs of which products read fp8 copies of their operands, and list these copies.

1. Candidates are low products of rows and a matrix (`Problem.matrix_products`). A product has one GEMM for its result and, with gradients,
   one GEMM for the gradient of each operand.
2. A GEMM stays in bf16 or fp16 if an override, the recipe or another graph of the model says so, or if kernels do not take its sizes. It
   does so, too, if the device has no fp8 units or waits for the host, or if an op such as `topk` ranks the result, or it serves as logits.
   Device and result do not count if an override or `products="fp8-all"` asks for fp8.
3. The other GEMMs save time in fp8, but need kernels that make their copies. All readers of a value share its copies. The best choice,
   found exactly, is a maximum-weight closure (`planner/min_cut.py`). A GEMM that is asked for runs in fp8 at any price.
4. If the graphs of a model share one plan (`Policy.parity`), a graph without gradients is decided as if it had the GEMMs of training.

A given plan names the GEMMs that run in fp8. Their copies follow from them.

A product that an override or a plan makes "wide" (bf16 operands, fp32 result) has the colour high (fp32), and gets the edit `WIDE_PRODUCT`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from amprewrite.ir.cost import MatrixProduct, ProductPrices
from amprewrite.ir.op_graph import OpNode
from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.ir.plans.product_plan import GemmPlan, ProductPlan, ProductReason, QuantisedCopy, QuantisedProducts
from amprewrite.planner.min_cut import heaviest_closure
from amprewrite.tables.devices import named_device
from amprewrite.tables.formats import (
    ALIGNMENT,
    BASE,
    GEMMS,
    GRAD_IN,
    GRAD_WEIGHT,
    OUT,
    READS,
    RECIPES,
    ROWS,
    STRAIGHT,
    TENSOR,
    G,
    Recipe,
    W,
    X,
)
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import Colour, Edit, OpKind

Key = tuple[str, str]
"""(name of a matrix product, one of its GEMMs: "out", "grad_in" or "grad_weight")."""
RANKS, SHARES = ops_with(Trait.RANKS), ops_with(Trait.SHARES_OUT)


class PlanProducts(Pass[Problem, Decisions]):
    needs = ("matrix_products", "given", "policy.products")

    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        wide = [name for name in problem.matrix_products if _is_wide(problem, decisions, name)]
        for name in wide:
            decisions.edit(problem, name, Edit.WIDE_PRODUCT)
        for edit in problem.given.edits if problem.given is not None else ():
            if edit.what is Edit.WIDE_PRODUCT and edit.node not in problem.matrix_products:
                decisions.note(f"{edit.node} cannot be wide, because it is no product of rows and a matrix: it reads fp32")
        low = {name: product for name, product in problem.matrix_products.items() if decisions.paints[name].colour is Colour.LOW}
        given = problem.given.quantised if problem.given is not None else None
        if given is not None:
            plans, recipe = tuple(plan for plan in given.products if plan.node in low), RECIPES.get(given.recipe)
        elif problem.policy.products is not None:
            plans, recipe = _Choice(problem, low).plans(), problem.policy.products.preset.recipe
        else:
            return
        if recipe is not None and plans:
            decisions.quantised = QuantisedProducts(recipe.name, plans, copies_of(problem, plans, recipe, _largest(problem, given)))


def _is_wide(problem: Problem, decisions: Decisions, name: str) -> bool:
    """True if a product has the colour high (fp32), and a given plan or an override makes it multiply bf16 operands to an fp32 result."""
    if problem.policy.low is not BASE or decisions.paints[name].colour is not Colour.HIGH:
        return False
    if problem.given is not None:
        return any(edit.node == name and edit.what is Edit.WIDE_PRODUCT for edit in problem.given.edits)
    return problem.policy.is_wide(name, problem.graph[name].module)


def _largest(problem: Problem, given: QuantisedProducts | None) -> dict[str, float]:
    """Return the largest magnitude of each value that may get a constant scale; {} if all scales are computed in each call.

    The magnitudes are those in the plan `given`. Without such a plan they come from sample batches, for graphs without gradients only.
    """
    if given is not None and given.copies:
        return {copy.value: copy.largest for copy in given.copies if copy.largest is not None}
    samples = problem.calibration if not problem.training else None
    # if `model` is "", take no ranges: scales of an ONNX file are computed later, and ranges of first calls are not from sample batches
    seen = samples.of(problem.graph) if samples is not None and samples.model else None
    return {name: found.amax for name, found in seen.values.items() if found.amax} if seen is not None else {}


def gemms_of(product: MatrixProduct, training: bool) -> tuple[str, ...]:
    """Return the GEMMs of a product: "out", and if `training`, "grad_in" or "grad_weight" for each operand that needs a gradient."""
    learns = {OUT: True, GRAD_IN: training and product.x_learns, GRAD_WEIGHT: training and product.w_learns}
    return tuple(gemm for gemm in GEMMS if learns[gemm])


@dataclass
class _Choice:
    """Chooses which GEMMs run in fp8, among the bf16 or fp16 products of one graph."""

    problem: Problem
    products: Mapping[str, MatrixProduct]

    def __post_init__(self) -> None:
        policy = self.problem.policy.products
        assert policy is not None
        self.policy, self.recipe = policy, policy.preset.recipe
        named = self.problem.policy.device  # not the device of `costs`: for an ONNX file, it ignores the device that a user names
        device = named_device(named) if named else self.problem.costs.device
        self.prices = ProductPrices(device, policy.fused, kernel=policy.kernel and find_spec("triton") is not None)
        self.alike = self.problem.training or self.problem.policy.parity is not None
        self.share = 1.0 if self.problem.training else float(self.problem.costs.training)
        """Weight of the backward in the prices: 1 if this graph trains, otherwise the weight of training in `Problem.costs`."""
        self.kept = self.problem.costs.cached_weights and not self.alike
        """True if fp8 copies of weights are kept between calls, so that calls do not pay for them. False in training and with `parity`."""
        known = self.problem.agreed.products
        self.agreed = known.of(self.problem.graph[name] for name in self.products) if known is not None else {}

    def plans(self) -> tuple[ProductPlan, ...]:
        """Return one record for each product: the format of each of its GEMMs (forward, gradient of input, of weight), and the reason."""
        found = {
            (name, gemm): self._settled(name, gemm) for name, product in self.products.items() for gemm in gemms_of(product, self.alike)
        }
        chosen = self._cheapest({key: plan is not None for key, plan in found.items() if plan is None or plan.fp8})
        shown = {name: gemms_of(product, self.problem.training) for name, product in self.products.items()}
        return tuple(
            ProductPlan(name, tuple(found[name, gemm] or self._priced(name, gemm, (name, gemm) in chosen) for gemm in gemms))
            for name, gemms in shown.items()
        )

    def _priced(self, name: str, gemm: str, pays: bool) -> GemmPlan:
        return self._gemm(gemm, pays, ProductReason.PAYS if pays else ProductReason.COSTS, self._shown(name, gemm))

    def _settled(self, name: str, gemm: str) -> GemmPlan | None:
        """Return the decision on one GEMM if it can be made alone, for instance by an override; None if `_cheapest` decides on it."""
        product, node = self.products[name], self.problem.graph[name]
        rule = self.policy.asked(name, node.module, gemm)
        if rule is not None and not rule.fp8:
            return self._gemm(gemm, False, ProductReason.ASKED, rule.key)
        if gemm not in self.recipe.gemms:
            return self._gemm(gemm, False, ProductReason.RECIPE, self.recipe.name)
        if product.inner % ALIGNMENT or product.columns % ALIGNMENT:
            return self._gemm(gemm, False, ProductReason.UNALIGNED, f"{product.inner} x {product.columns}")
        if rule is not None:
            return self._gemm(gemm, True, ProductReason.ASKED, rule.key)
        if gemm == OUT and name in self.agreed:
            return self._gemm(gemm, self.agreed[name] is Colour.LOW, ProductReason.AGREED)
        if not self.policy.preset.priced:
            return self._gemm(gemm, True, ProductReason.ANY_PRICE, self.policy.name)
        if not self.prices.device.fp8:
            return self._gemm(gemm, False, ProductReason.NO_UNITS, self.prices.device.name)
        chooser, scores = _ends(self.problem, node)
        if chooser or scores:
            return self._gemm(gemm, False, ProductReason.CHOOSES if chooser else ProductReason.SCORES, chooser)
        waits = self.prices.waits_for_host(*self._sizes(name, gemm))
        return self._gemm(gemm, False, ProductReason.WAITS, self._shown(name, gemm)) if waits else None

    def _gemm(self, gemm: str, fp8: bool, reason: ProductReason, detail: str = "") -> GemmPlan:
        return GemmPlan(gemm, self.recipe.pair(gemm) if fp8 else self.problem.policy.low.name, reason, detail)

    def _sizes(self, name: str, gemm: str) -> tuple[int, int, int]:
        """Return (rows, size of the summed dim, columns) of one GEMM ("out", "grad_in" or "grad_weight") of the product `name`."""
        product = self.products[name]
        m, k, n = product.rows, product.inner, product.columns
        return {OUT: (m, k, n), GRAD_IN: (m, n, k), GRAD_WEIGHT: (n, m, k)}[gemm]

    def _shown(self, name: str, gemm: str) -> str:
        return " x ".join(map(str, self._sizes(name, gemm)))

    def _cheapest(self, asked: Mapping[Key, bool]) -> frozenset[object]:
        """Return the GEMMs to run in fp8, and the kernels that make their copies.

        `asked` maps each GEMM to True if it must run in fp8, and to False if it is optional. The optional GEMMs are chosen together, so
        that they save the most time after the cost of their copies. Copies that a required GEMM reads anyway count as free.
        """
        gains: dict[object, int] = {}
        costs: dict[object, int] = defaultdict(int)
        needs: dict[tuple[object, object], None] = {}
        for (name, gemm), always in asked.items():
            share = 1.0 if gemm == OUT else self.share
            gains[name, gemm] = 0 if always else round(share * self.prices.saved(*self._sizes(name, gemm)))
            for role, way in READS[gemm]:
                *value, numel = value_of(name, self.products[name], role)
                part = 1.0 if role != G and way == STRAIGHT else self.share
                part = 0.0 if role == W and self.kept else part
                for kernel, ticks in self.prices.copy(self.recipe, role, way, numel):
                    made = (role, *value, kernel)
                    costs[made] = max(costs[made], round(part * ticks))
                    needs[(name, gemm), made] = None
        gains |= {key: 1 + sum(costs.values()) for key, always in asked.items() if always}
        return heaviest_closure({**gains, **{kernel: -cost for kernel, cost in costs.items()}}, needs)


def value_of(name: str, product: MatrixProduct, role: str) -> tuple[str, int, int]:
    """Return (name, write version, number of elements) of an operand of the product `name`.

    `role` is "x", "w", or "g", the gradient of the result. The write version depends on in-place writes and on the grad mode.
    """
    m, k, n = product.rows, product.inner, product.columns
    return {X: (product.x, product.x_version, m * k), W: (product.w, product.w_version, k * n), G: (name, 0, m * n)}[role]


def _ends(problem: Problem, product: OpNode) -> tuple[str, bool]:
    """Return (name of an op such as `topk` that ranks the result of `product`, or ""; True if the result serves only as scores).

    The result serves as scores, such as logits, if all its readers are ranking ops, outputs, denied ops or softmaxes. In place of a reader
    that is a view, its own readers are examined. The same holds for other ops of kind CLEAR (harmless in any precision) if their other
    operands are weights. A softmax may have any readers.
    """
    graph, chooser, scores = problem.graph, "", True
    open_, known = [product.name], {product.name}
    shared: set[str] = set()
    while open_:
        name = open_.pop()
        readers = list(graph.readers(name))
        for reader in readers:
            if reader.op in RANKS:
                chooser = chooser or reader.name
            alone = all(feeder.name in known or feeder.role in ("parameter", "buffer", "constant") for feeder in graph.feeders(reader.name))
            through = reader.role == "op" and alone and (reader.kind is OpKind.CLEAR or reader.op in SHARES)
            ends = reader.role == "output" or reader.kind is OpKind.DENY or reader.op in RANKS
            scores = scores and (name in shared or through or ends)
            if through and reader.name not in known:
                known.add(reader.name)
                open_.append(reader.name)
                shared |= {reader.name} if reader.op in SHARES or name in shared else set()
    return chooser, scores and bool(list(graph.readers(product.name)))


def copies_of(problem: Problem, plans: tuple[ProductPlan, ...], recipe: Recipe, largest: Mapping[str, float]) -> tuple[QuantisedCopy, ...]:
    """Return the fp8 copies that the GEMMs of `plans` read. Readers of one value share a copy if they need the same format and scales.

    `largest` holds the largest magnitudes of values. A left operand gets a constant scale if it is in `largest`, has one scale for the
    whole tensor, and was not written yet. A weight has two copies if some products read it and others read its transpose.
    """
    found: dict[tuple[str, str, int, str, str, bool], list[Key]] = {}
    for plan in plans:
        product = problem.matrix_products[plan.node]
        for gemm in (each.gemm for each in plan.gemms if each.fp8):
            for role, way in READS[gemm]:
                scales = TENSOR
                if recipe.scaling(role, way) == ROWS:
                    scales = ROWS if (way == STRAIGHT) != (role == W and product.transposed) else "columns"
                value, version, _ = value_of(plan.node, product, role)
                key = (role, value, version, recipe.format(role).name, scales, role == W and product.transposed)
                found.setdefault(key, []).append((plan.node, gemm))
    return tuple(
        QuantisedCopy(
            value, to, scales, tuple(f"{node}.{gemm}" for node, gemm in readers), role,
            kept=role != G and any(gemm != OUT for _, gemm in readers), weight=role != G and problem.graph.seen(value).role == "parameter",
            write_version=version, largest=largest.get(value) if role == X and scales == TENSOR and not version else None,
        )
        for (role, value, version, to, scales, _), readers in found.items()
    )  # fmt: skip
