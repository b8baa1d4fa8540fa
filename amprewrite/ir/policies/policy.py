"""The user's options about formats, lists, overrides, fp8 products and padding. They are frozen, and checked when they are created."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from amprewrite.tables.boundary.arguments import did_you_mean, is_flag, names_module, refuse_unmatched, shown
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import BASE, FP8, FP32, GEMMS, LOW_FORMATS, LOW_NAMES, PRESETS, WIDE, Format, Preset
from amprewrite.tables.ops.op_lists import OPS, OpLists, find_op
from amprewrite.tables.vocabulary import OpKind

_WORDS = {
    FP32.name: "high", "high": "high", "deny": "deny", "low": "low", "allow": "allow",
    **dict.fromkeys(LOW_NAMES, "low"), "infer": "infer", "clear": "clear", "internal": "internal", WIDE: WIDE,
}  # fmt: skip


@dataclass(frozen=True)
class Override:
    """One entry of `overrides=`: it moves an op to another list, or makes modules or nodes low, high (fp32) or wide (bf16 in, fp32 out)."""

    key: str
    """The key as the user wrote it."""
    scope: Literal["op", "module", "node"]
    pattern: str
    """A pattern of module paths or node names; the name of an op if the scope is "op"."""
    word: str
    """"high", "low" or "wide" (a product of bf16 operands with an fp32 result); the name of a list if the scope is "op"."""

    def matches_node(self, name: str) -> bool:
        """True if this is a node override whose pattern matches `name`."""
        return self.scope == "node" and fnmatch.fnmatchcase(name, self.pattern)

    def matches_module(self, path: str) -> bool:
        """True if this is a module override whose pattern matches `path`, or the path of a module that contains it."""
        return self.scope == "module" and names_module(self.pattern, path)


def parse_overrides(overrides: Mapping[str, str], low: Format) -> tuple[Override, ...]:
    """Return an `Override` for each entry of the option `overrides=`, such as {"softmax": "deny", "module:encoder.*": "fp32"}.

    `low` is the low format of the rewrite. Raises PolicyError for unknown ops (with similar names), unknown scopes and values, for low
    formats other than `low`, and for contradictions between entries for one op.
    """
    if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
        raise PolicyError(f"overrides= takes a dict such as {{'softmax': 'deny', 'module:encoder.*': 'fp32'}}, not {shown(overrides)}")
    parsed: list[Override] = []
    for key, asked in overrides.items():
        scope, colon, pattern = key.partition(":")
        if not colon or pattern.startswith(":"):  # a key such as `mylib::op` names an op of another library and has no scope
            scope, pattern = "op", key
        if scope not in ("op", "module", "node"):
            raise PolicyError(f"overrides[{shown(key)}]: {shown(scope)} is no scope; write 'OP', 'module:PATTERN' or 'node:PATTERN'")
        word = _WORDS.get(asked.lower()) if isinstance(asked, str) else None
        allowed = sorted(_WORDS.keys() - {WIDE}) if scope == "op" else ["fp32", "high", "low", WIDE]
        if word is None or (word == WIDE if scope == "op" else word not in ("high", "low", WIDE)):
            raise PolicyError(f"overrides[{shown(key)}] = {shown(asked)} is not understood; use one of {', '.join(allowed)}")
        if asked.lower() in LOW_NAMES and asked.lower() != low.name:
            raise PolicyError(f"overrides[{shown(key)}] asks for {asked}, but this rewrite's low format is {low.name}")
        if word == WIDE and low is not BASE:
            raise PolicyError(f"overrides[{shown(key)}] asks for wide products, which need dtype='bf16'; 'fp32' keeps them from rounding")
        if scope == "op":
            op = find_op(pattern)
            if op is None:
                hint = did_you_mean(pattern, sorted(OPS), "; `amprewrite.tables.ops.op_lists.OPS` lists all ops", likeness=0.5)
                raise PolicyError(f"overrides[{shown(key)}]: there is no op {shown(pattern)}{hint} (for a module write 'module:PATH')")
            pattern, word = op.name, {"high": "deny", "low": "allow"}.get(word, word)
            for other in parsed:
                if other.scope == "op" and other.pattern == pattern and other.word != word:
                    raise PolicyError(f"overrides[{shown(key)}] says {word}, overrides[{shown(other.key)}] says {other.word}: keep one")
        parsed.append(Override(key, scope, pattern, word))  # type: ignore[arg-type]
    return tuple(parsed)


@dataclass(frozen=True)
class Policy:
    """The options that decide the plan of a model: low format, op lists, overrides, prices and fp8 products."""

    low: Format
    lists: str | OpLists = "default"
    overrides: tuple[Override, ...] = ()
    keeps_copies: bool = False
    """Whether calls without gradients keep the low copies of weights for the next call, so that casts of weights are free in such calls."""
    device: str = ""
    """Name of the device for which to plan, from `amprewrite.tables.devices.NAMED`; "" for the device at hand."""
    measure: bool = False
    """Whether to time ops and casts on the device at hand instead of computing prices from the device table."""
    memory: float = 0.0
    """Price in seconds of one byte of activations that is kept for the backward."""
    parity: float | None = None
    """Weight of training, from 0 to 1, in prices that all graphs share: parity * (price of a training step) + (1 - parity) * (price of a
    pass without gradients). None if each graph has its own: of a training step if gradients are on, otherwise of a pass without them."""
    products: ProductPolicy | None = None
    """Rules for low products that may read fp8 copies of their operands; None if no product may."""
    may_decline: bool = False
    """Whether a graph that gains nothing from the low format may stay fp32, because the user did not choose the format."""
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.low is not FP32 and self.low not in LOW_FORMATS:
            raise PolicyError(f"{self.low.name} cannot be the low format; use bf16 or fp16")

    def is_wide(self, name: str, module: str) -> bool:
        """True if the override for the node `name`, called in `module`, asks for a wide product (bf16 operands, fp32 result)."""
        asked = self.asked_for(name, module)
        return asked is not None and asked.word == WIDE

    @property
    def lists_name(self) -> str:
        return self.lists if isinstance(self.lists, str) else self.lists.name

    def op_lists(self, base: OpLists) -> OpLists:
        """Return a copy of `base` in which the op overrides have moved their ops to other lists."""
        for override in self.overrides:
            if override.scope == "op":
                base = base.moved(override.pattern, OpKind(override.word))
        return base

    def asked_for(self, name: str, module: str) -> Override | None:
        """Return the override that decides the node `name`, called in `module`; None if no override matches.

        A node override takes precedence over a module override, and a longer module pattern over a shorter pattern. Raises PolicyError if
        two matching overrides of the same rank contradict each other.
        """
        if not self.overrides:
            return None
        for hits in (
            [o for o in self.overrides if o.matches_node(name)],
            sorted((o for o in self.overrides if o.matches_module(module)), key=lambda o: -len(o.pattern)),
        ):
            if not hits:
                continue
            first = hits[0]
            for other in hits[1:]:
                if other.word != first.word and (first.scope == "node" or len(other.pattern) == len(first.pattern)):
                    raise PolicyError(
                        f"overrides[{shown(first.key)}] says {first.word} and overrides[{shown(other.key)}] says {other.word} for node "
                        f"{name} in module {module or 'the root'}: make one of them narrower"
                    )
            return first
        return None

    def check(self, scope: str, names: Iterable[str]) -> None:
        """Raise PolicyError, with similar names, if an override of the kind `scope` ("module" or "node") matches none of `names`."""
        refuse_unmatched("overrides", scope, {each.key: each.pattern for each in self.overrides if each.scope == scope}, names)


EXAMPLE = "{'preset': 'fp8-safe', 'module:head': 'bf16', 'node:linear_3.grad_weight': 'bf16'}"


@dataclass(frozen=True)
class ProductRule:
    """One entry of `products=`: a pattern that selects GEMMs, and whether they run in fp8 or in the low format.

    For GEMMs that a rule sends to fp8, three checks are skipped: whether the device has fp8 units, whether fp8 saves time, and whether the
    result is used as logits or for a choice, such as a router's choice of experts. A rule for fp8 has no effect on products that stay fp32,
    on sizes that fp8 kernels do not take, and on GEMMs that the preset's recipe never runs in fp8.
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
    """The parsed option `products=`: which matrix products may run in fp8."""

    name: str
    """Name of the preset."""
    rules: tuple[ProductRule, ...] = ()
    fused: bool = False
    """Whether a compiler runs the graphs, and fuses the amax and the cast of each fp8 copy with the ops around them."""
    kernel: bool = True
    """Whether prices of graphs without a compiler assume that amprewrite's own Triton kernel makes the fp8 copies."""

    @property
    def preset(self) -> Preset:
        return PRESETS[self.name]

    def asked(self, name: str, module: str, gemm: str) -> ProductRule | None:
        """Return the rule that decides the GEMM `gemm` of the node `name`, called in `module`; None if no rule matches.

        A rule for a node takes precedence over a rule for a module, then a rule for one GEMM over a rule for all GEMMs of a product, then a
        longer pattern over a shorter one.
        """
        hits = [rule for rule in self.rules if rule.matches(name, module, gemm)]
        return max(hits, key=lambda rule: (rule.scope == "node", bool(rule.gemm), len(rule.pattern)), default=None)

    def check(self, scope: str, names: Iterable[str]) -> None:
        """Raise PolicyError, with similar names, if a rule of the kind `scope` ("module" or "node") matches none of `names`."""
        refuse_unmatched("products", scope, {each.key: each.pattern for each in self.rules if each.scope == scope}, names)


def parse_products(products: Any, fused: bool = False, low: Format = BASE) -> ProductPolicy | None:
    """Parse the option `products=`: the name of a preset, or a mapping of rules. Return None for None, with which no product runs in fp8.

    The key "preset" of the mapping names the preset ("fp8" by default). The value of a rule is "fp8" or the name of `low`, the format of
    all other products. `fused` is True if a compiler runs the graphs and fuses casts to fp8. Raises PolicyError if `products` is invalid.
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


MODES = ("auto", "always", "never", "measure")
MOST = 4096
"""Largest multiple that `pad=` accepts, since a larger number is surely a mistake."""


@dataclass(frozen=True)
class PadRule:
    """One entry of `pad=`: when to pad sizes in modules that match a pattern, or in all modules, and to which multiple."""

    mode: str
    """When to pad: "auto" if predicted times show a gain, "measure" if measured times show one, "always", or "never"."""
    multiple: int | None = None
    """Sizes are padded to a multiple of this; None for the multiple that suits the low format."""
    pattern: str = ""
    """Pattern of module paths; "" for all modules."""

    def matches(self, module: str) -> bool:
        """True if the pattern matches the path `module`, or the path of a module that contains it."""
        return names_module(self.pattern, module)


@dataclass(frozen=True)
class PadPolicy:
    """The parsed option `pad=`: which sizes may be padded, and to which multiple."""

    default: PadRule = PadRule("auto")
    modules: tuple[PadRule, ...] = ()

    def rule(self, module: str) -> PadRule:
        """Return the rule for ops called in `module`: the rule with the longest matching pattern, otherwise the default."""
        hits = [rule for rule in self.modules if rule.matches(module)]
        return max(hits, key=lambda rule: len(rule.pattern)) if hits else self.default

    @property
    def off(self) -> bool:
        """True if nothing may be padded."""
        return self.default.mode == "never" and all(rule.mode == "never" for rule in self.modules)

    def check_modules(self, paths: Iterable[str]) -> None:
        """Raise PolicyError, with similar names, if the pattern of a rule matches none of `paths`, the modules of the model."""
        refuse_unmatched("pad", "module", {f"module:{rule.pattern}": rule.pattern for rule in self.modules}, paths)


def parse_pad(pad: Any, can_measure: bool) -> PadPolicy:
    """Parse the option `pad=`: "auto", "always", "never" (also False or None), "measure", a multiple (8), or `{"module:PATTERN": ...}`.

    Each value of the mapping has one of the other forms. `can_measure` is True if there is a GPU on which to measure. Raises PolicyError
    for anything else, and for "measure" without such a GPU.
    """
    if isinstance(pad, PadPolicy):
        return pad
    if not isinstance(pad, Mapping):
        return PadPolicy(_pad_rule(pad, "", "pad", can_measure))
    rules = []
    for key, asked in pad.items():
        scope, colon, pattern = str(key).partition(":")
        if not isinstance(key, str) or scope != "module" or not colon or not pattern:
            raise PolicyError(f"pad[{shown(key)}]: keys are 'module:PATTERN', such as 'module:encoder.*'")
        rules.append(_pad_rule(asked, pattern, f"pad[{shown(key)}]", can_measure))
    return PadPolicy(modules=tuple(rules))


def _pad_rule(asked: Any, pattern: str, where: str, can_measure: bool) -> PadRule:
    if asked is None or (is_flag(asked) and not asked):
        return PadRule("never", None, pattern)
    if isinstance(asked, int) and not isinstance(asked, bool):
        if not 1 <= asked <= MOST:
            raise PolicyError(f"{where} = {shown(asked)}: a multiple lies between 1 and {MOST}; Tensor Cores want 8 in fp16 and bf16")
        return PadRule("always", asked, pattern)
    if not isinstance(asked, str) or asked not in MODES:
        modes = ", ".join(repr(mode) for mode in MODES)
        raise PolicyError(f"{where} = {shown(asked)} is not understood; use {modes}, a multiple such as 8, or {{'module:PATTERN': …}}")
    if asked == "measure" and not can_measure:
        raise PolicyError(f"{where} = 'measure' times kernels on a CUDA device, and there is none; use 'auto' or 'always'")
    return PadRule(str(asked), None, pattern)
