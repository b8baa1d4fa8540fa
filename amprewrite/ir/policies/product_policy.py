"""The option `products=`, checked when it is read."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from amprewrite.tables.boundary.arguments import names_module, refuse_unmatched, shown
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import Format
from amprewrite.tables.recipes import BASE, FP8, GEMMS, PRESETS, Preset

EXAMPLE = "{'preset': 'fp8-safe', 'module:head': 'bf16', 'node:linear_3.grad_weight': 'bf16'}"


@dataclass(frozen=True)
class ProductRule:
    """One entry of `products=`: a pattern that selects GEMMs, and whether they run in fp8 or in the low format.

    A rule for fp8 holds even where fp8 saves no time, and where a result is read as logits or decides a choice. It does not hold for a
    product that stays fp32, for sizes that fp8 kernels do not take, and for a GEMM that the recipe leaves in the low format.
    """

    key: str
    """The key as the user wrote it."""
    scope: str
    """"module" or "node"."""
    pattern: str
    """A pattern of module paths or node names."""
    gemm: str
    """"out" (the forward), "grad_in" or "grad_weight" (the gradients of a product's operands); "" for all three GEMMs."""
    fp8: bool
    """True if the GEMMs run in fp8, False if they run in the low format."""

    def matches(self, name: str, module: str, gemm: str) -> bool:
        """True if the rule selects the GEMM `gemm` of the node `name`, which is called in `module`."""
        here = fnmatch.fnmatchcase(name, self.pattern) if self.scope == "node" else names_module(self.pattern, module)
        return here and self.gemm in ("", gemm)


@dataclass(frozen=True)
class ProductPolicy:
    """The parsed option `products=`."""

    name: str
    """Name of the preset."""
    rules: tuple[ProductRule, ...] = ()
    fused: bool = False
    """Whether a compiler runs the graphs and fuses amaxes and casts with the ops around them."""
    kernel: bool = True
    """Whether to assume that amprewrite's own Triton kernel makes the fp8 copies where no compiler makes them."""

    @property
    def preset(self) -> Preset:
        return PRESETS[self.name]

    def asked(self, name: str, module: str, gemm: str) -> ProductRule | None:
        """Return the rule that decides the GEMM `gemm` of the node `name`, called in `module`; None if no rule matches.

        Rules for nodes take precedence over rules for modules, rules for single GEMMs over rules for whole products, and longer patterns
        over shorter patterns.
        """
        hits = [rule for rule in self.rules if rule.matches(name, module, gemm)]
        return max(hits, key=lambda rule: (rule.scope == "node", bool(rule.gemm), len(rule.pattern)), default=None)

    def check(self, scope: str, names: Iterable[str]) -> None:
        """Raise PolicyError, with similar names, if a pattern matches none of `names`. `scope` is "module" (paths) or "node"."""
        refuse_unmatched("products", scope, {each.key: each.pattern for each in self.rules if each.scope == scope}, names)


def parse_products(products: Any, fused: bool = False, low: Format = BASE) -> ProductPolicy | None:
    """Parse the option `products=`: the name of a preset, or a mapping of rules whose key "preset" names the preset ("fp8" by default).

    `fused` is True if a compiler runs the graphs. Rules say "fp8" or the name of `low`, the format of products outside of fp8. Returns None
    for None: no product runs in fp8. Raises PolicyError for anything else.
    """
    if products is None or isinstance(products, ProductPolicy):
        return products
    asked = products if isinstance(products, Mapping) else {"preset": products}
    name = asked.get("preset", "fp8")
    if not isinstance(name, str) or name not in PRESETS:
        where = f"products={shown(name)}" if asked is not products else f"products['preset'] = {shown(name)}"
        raise PolicyError(f"{where} is no preset; use one of {', '.join(PRESETS)}, or rules such as {EXAMPLE}")
    return ProductPolicy(name, tuple(_rule(key, word, low) for key, word in asked.items() if key != "preset"), fused)


def _rule(key: Any, word: Any, low: Format) -> ProductRule:
    scope, colon, pattern = str(key).partition(":")
    if not isinstance(key, str) or not colon or scope not in ("module", "node") or not pattern:
        raise PolicyError(f"products[{shown(key)}]: keys are 'preset', 'module:PATTERN' and 'node:PATTERN', as in {EXAMPLE}")
    if not isinstance(word, str) or word not in (FP8, low.name):
        raise PolicyError(f"products[{shown(key)}] = {shown(word)} is not understood; use {FP8} or {low.name}")
    stem, _, gemm = pattern.rpartition(".")
    stem, gemm = (stem, gemm) if gemm in GEMMS and stem else (pattern, "")
    return ProductRule(key, scope, stem, gemm, word == FP8)
