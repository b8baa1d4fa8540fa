"""The option `pad=`, checked when it is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from amprewrite.tables.boundary.arguments import is_flag, names_module, refuse_unmatched, shown
from amprewrite.tables.errors import PolicyError

MODES = ("auto", "always", "never", "measure")
MOST = 4096
"""Largest multiple that `pad=` accepts, since a larger number is surely a mistake."""


@dataclass(frozen=True)
class PadRule:
    """The padding rule for modules that match a pattern, or for all modules."""

    mode: str
    """One of `MODES`."""
    multiple: int | None = None
    """Sizes are padded to a multiple of this; None for the multiple that suits the low format."""
    pattern: str = ""
    """Pattern of module paths; "" for all modules."""

    def matches(self, module: str) -> bool:
        """True if the pattern matches the path `module`, or the path of a module that contains it."""
        return names_module(self.pattern, module)


@dataclass(frozen=True)
class PadPolicy:
    """The parsed option `pad=`."""

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
        """Raise PolicyError, with similar names, if a pattern matches no module of the model."""
        refuse_unmatched("pad", "module", {f"module:{rule.pattern}": rule.pattern for rule in self.modules}, paths)


def parse_pad(pad: Any, can_measure: bool) -> PadPolicy:
    """Parse the option `pad=`: "auto", "always", "never" (also False or None), "measure", a multiple, or `{"module:PATTERN": ...}`.

    Each value of the mapping has one of the other forms. `can_measure` is True if there is a GPU on which to measure. Raises PolicyError
    for anything else, and for "measure" without such a GPU.
    """
    if isinstance(pad, PadPolicy):
        return pad
    if not isinstance(pad, Mapping):
        return PadPolicy(_rule(pad, "", "pad", can_measure))
    rules = []
    for key, asked in pad.items():
        scope, colon, pattern = str(key).partition(":")
        if not isinstance(key, str) or scope != "module" or not colon or not pattern:
            raise PolicyError(f"pad[{shown(key)}]: keys are 'module:PATTERN', such as 'module:encoder.*'")
        rules.append(_rule(asked, pattern, f"pad[{shown(key)}]", can_measure))
    return PadPolicy(modules=tuple(rules))


def _rule(asked: Any, pattern: str, where: str, can_measure: bool) -> PadRule:
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
