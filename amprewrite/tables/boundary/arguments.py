"""Checks of user arguments that several modules share, and functions that quote values in error messages."""

from __future__ import annotations

import difflib
import fnmatch
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from amprewrite.tables.errors import PolicyError

_QUOTE = reprlib.Repr()
_QUOTE.maxstring = _QUOTE.maxother = _QUOTE.maxlong = 80
_QUOTE.maxlist = _QUOTE.maxtuple = _QUOTE.maxset = _QUOTE.maxfrozenset = _QUOTE.maxdict = 8


def shown(value: object, most: int = 80) -> str:
    """Return `repr(value)` on one line of at most `most` characters, for messages. Longer texts lose their middle.

    If repr raises an error, the text is the name of the value's type.

        >>> shown("bf61")
        "'bf61'"
    """
    try:
        text = " ".join(_QUOTE.repr(value).split())
    except Exception:  # a user's `__repr__` may raise any error, which must not replace the message that quotes the value
        text = f"<{type(value).__name__}>"
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", *, likeness: float = 0.4, most: int = 3, scope: str = "") -> str:
    """Return the end of an error message: a question that names the words of `known` most similar to `word`; `otherwise` if none is.

    At most `most` words are named, each after the prefix `scope`. Their similarity is at least `likeness`, a number from 0 to 1.

        >>> did_you_mean("relo", ["relu", "gelu", "tanh"], likeness=0.6)
        '; did you mean relu?'
    """
    near = difflib.get_close_matches(word, list(known), most, likeness)
    return f"; did you mean {', '.join(scope + each for each in near)}?" if near else otherwise


def names_module(pattern: str, path: str) -> bool:
    """True if the shell pattern `pattern` matches the module path `path`, or the path of a module that contains this module.

        >>> names_module("encoder.*", "encoder.layer.0"), names_module("layer", "encoder.layer.0")
        (True, False)
    """
    parts = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def refuse_unmatched(option: str, scope: str, patterns: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise PolicyError, which suggests similar names, if a pattern in the option `option` matches none of `names`.

    `scope`: "module" if `names` are paths of modules, "node" if they are names of nodes. `patterns` maps each key that the user wrote to
    its pattern, for example {"module:head": "head"}.
    """
    known, nodes = sorted({name for name in names if name}), scope == "node"
    what = "matches no node of the captured graphs" if nodes else "matches no module of the model"
    for key, pattern in patterns.items():
        if not any(fnmatch.fnmatchcase(name, pattern) if nodes else names_module(pattern, name) for name in known):
            hint = did_you_mean(pattern, known, "; print(amp.plan) lists them" if nodes else "", scope=f"{scope}:")
            raise PolicyError(f"{option}[{shown(key)}] {what}{hint}")


def is_flag(value: object) -> bool:
    """True if `value` is a bool of Python or NumPy."""
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))


def flag(name: str, value: Any) -> bool:
    """Return the value of the boolean option `name`. Raises PolicyError for anything but True or False."""
    if not is_flag(value):
        raise PolicyError(f"{name}= takes True or False, not {shown(value)}")
    return bool(value)


def is_word(value: object, word: str) -> bool:
    """True if `value` is the string `word`. Unlike `value == word` it returns a bool even for an array, whose elements `==` compares."""
    return isinstance(value, str) and value == word


def keywords(name: str, value: Any) -> dict[str, Any]:
    """Return the keyword arguments in the option `name` as a dict; {} for None. Raises PolicyError if `value` is no mapping from str."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise PolicyError(f"{name}= takes a dict of keyword arguments by name, such as {{'mask': mask}}, not {type(value).__name__}")
    return dict(value)
