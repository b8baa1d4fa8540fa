"""The keys of a plan's JSON form and their meanings. A key is a field of a class, and its meaning is the docstring of the field."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from typing import Any

from amprewrite.ir.plans.pad_plan import PadCopy, PaddedValue, PadPlan, PadRegion
from amprewrite.ir.plans.plan import Candidate, Cast, ModelPlan, NodeEdit, NodePlan, RegionPlan, Skipped
from amprewrite.ir.plans.product_plan import GemmPlan, ProductPlan, QuantisedCopy, QuantisedProducts

NOT_WRITTEN = ("basis",)
"""Fields that are not written to JSON."""
KINDS = {
    "plan": ModelPlan,
    "region": RegionPlan,
    "node": NodePlan,
    "cast": Cast,
    "candidate": Candidate,
    "quantised": QuantisedProducts,
    "product": ProductPlan,
    "gemm": GemmPlan,
    "fp8 copy": QuantisedCopy,
    "pads": PadPlan,
    "pad region": PadRegion,
    "padded value": PaddedValue,
    "pad copy": PadCopy,
    "edit": NodeEdit,
    "skipped": Skipped,
}


def schema() -> dict[str, dict[str, str]]:
    """Return {kind of object: {key: meaning}} for the JSON form of a plan. `CastPlan.schema` is the public function."""
    return {kind: _meanings(cls) for kind, cls in KINDS.items()}


def _meanings(cls: type) -> dict[str, str]:
    """Return {field: its docstring} for a dataclass. Python keeps no docstrings of fields, so the source code is read."""
    body: list[Any] = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    pairs: list[Any] = [(field, text) for field, text in pairwise(body) if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)]
    return {field.target.id: " ".join(text.value.value.split()) for field, text in pairs if field.target.id not in NOT_WRITTEN}
