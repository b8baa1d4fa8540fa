"""The option `pad=`, checked when it is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from amprewrite.tables.boundary.arguments import did_you_mean, is_flag, names_module, shown
from amprewrite.tables.errors import PolicyError

MODES = ("auto", "always", "never", "measure")
MOST = 4096
"""Largest multiple that is accepted; a larger one is a mistake."""


@dataclass(frozen=True)
class PadRule:
    """The rule for modules that match a pattern, or for all modules."""

    mode: str
    multiple: int | None = None
    """None for the multiple of the format."""
    pattern: str = ""

    def matches(self, module: str) -> bool:
        """Whether the pattern matches a module or one of the modules around it."""
        return names_module(self.pattern, module)


@dataclass(frozen=True)
class PadPolicy:
    """The parsed option `pad=`."""

    default: PadRule = PadRule("auto")
    modules: tuple[PadRule, ...] = ()

    def rule(self, module: str) -> PadRule:
        """The rule for an op called in `module`: that of the longest pattern that matches."""
        hits = [rule for rule in self.modules if rule.matches(module)]
        return max(hits, key=lambda rule: len(rule.pattern)) if hits else self.default

    @property
    def off(self) -> bool:
        return self.default.mode == "never" and all(rule.mode == "never" for rule in self.modules)

    def check_modules(self, paths: Iterable[str]) -> None:
        """Raise PolicyError, with similar names, if a pattern matches no module of the model."""
        known = [path for path in paths if path]
        for rule in self.modules:
            if not any(rule.matches(path) for path in known):
                hint = did_you_mean(rule.pattern, known, scope="module:")
                raise PolicyError(f"pad[{shown('module:' + rule.pattern)}] matches no module of the model{hint}")


def parse_pad(pad: Any, can_measure: bool) -> PadPolicy:
    """Read "auto", "always", "never" (False, None), "measure", a multiple, or `{"module:PATTERN": any of those}`.

    `can_measure` says whether there is a GPU to measure on. Raises PolicyError for anything else.
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
