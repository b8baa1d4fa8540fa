"""Make dataclass objects from JSON. Every field is checked against its type, and an error names the place in the data.

A field may be str, bool, int, float, an enum, another dataclass, tuple[X, ...], tuple[X, Y], X | Y or a mapping from strings. Integers
beyond 64 bits are refused, so that later code need not expect them.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

MOST = 2**63
"""Integers must be smaller than this in magnitude."""


class BadData(ValueError):
    """Raised for invalid data. The message names the error and its place in the data."""


def read_json(text: str) -> Any:
    """Return the parsed JSON text. Raises BadData if it is invalid, nested too deeply, or holds a number with too many digits."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise BadData("it is nested too deeply") from error
    except ValueError as error:  # the text is no JSON, or holds an integer with thousands of digits
        raise BadData(f"not JSON ({error})") from error
    return found


def build(kind: Any, data: Any, where: str = "", names: frozenset[Any] = frozenset()) -> Any:
    """Convert parsed JSON `data` to a value of the type `kind`, such as a dataclass. Raises BadData if it does not fit the type.

    `where` is the path to `data` in the document, for errors. Enum members are given by value, or by name if `names` holds their class.
    """
    if is_dataclass(kind) and isinstance(kind, type):
        return _record(kind, data, where, names)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member(kind, data, where, kind in names)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return _row(inner, data, where, names)
    if origin in (types.UnionType, typing.Union):
        return _either(inner, data, where, names)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise _wrong(where, data, "an object")
        return {key: build(inner[1], value, f"{where}[{key!r}]", names) for key, value in data.items()}
    return _plain(kind, data, where)


def _record(kind: Any, data: Any, where: str, names: frozenset[Any]) -> Any:
    if not isinstance(data, dict):
        raise _wrong(where, data, f"an object ({kind.__name__})")
    hints = _hints(kind)
    known = {each.name: each for each in fields(kind) if each.init}
    for key in data:
        if key not in known:
            raise BadData(f"{_path(where, key)} is no key of a {kind.__name__}")
    missing = [name for name, each in known.items() if each.default is MISSING and each.default_factory is MISSING and name not in data]
    if missing:
        raise BadData(f"{where or 'it'} lacks {missing[0]!r}")
    return kind(**{key: build(hints[key], value, _path(where, key), names) for key, value in data.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _member(kind: type[Enum], data: Any, where: str, by_name: bool) -> Enum:
    if isinstance(data, str):
        for member in kind:
            if data == (member.name if by_name else member.value):
                return member
        raise BadData(f"{where}: {data[:40]!r} is not a valid {kind.__name__}")
    raise _wrong(where, data, f"a {kind.__name__}")


def _row(inner: tuple[Any, ...], data: Any, where: str, names: frozenset[Any]) -> tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        raise _wrong(where, data, "a list")
    if len(inner) == 2 and inner[1] is Ellipsis:
        return tuple(build(inner[0], value, f"{where}[{index}]", names) for index, value in enumerate(data))
    if len(data) != len(inner):
        raise BadData(f"{where} holds {len(data)} values instead of {len(inner)}")
    return tuple(build(kind, value, f"{where}[{index}]", names) for index, (kind, value) in enumerate(zip(inner, data, strict=True)))


def _either(inner: tuple[Any, ...], data: Any, where: str, names: frozenset[Any]) -> Any:
    if data is None and type(None) in inner:
        return None
    problem = _wrong(where, data, "null")
    for kind in inner:
        if kind is not type(None):
            try:
                return build(kind, data, where, names)
            except BadData as error:
                problem = error
    raise problem


def _plain(kind: Any, data: Any, where: str) -> Any:
    if kind is bool and isinstance(data, bool):
        return data
    if kind is str and isinstance(data, str):
        return data
    if kind is int and isinstance(data, int) and not isinstance(data, bool):
        if not -MOST < data < MOST:
            raise BadData(f"{where} is a number beyond 64 bits")
        return data
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        if isinstance(data, int) and not -MOST < data < MOST:
            raise BadData(f"{where} is a number beyond 64 bits")
        if math.isnan(data):
            raise BadData(f"{where} is not a number")
        return float(data)
    raise _wrong(where, data, {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}.get(kind, str(kind)))


def _wrong(where: str, data: Any, wanted: str) -> BadData:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a bool", int: "an int", float: "a float"}
    found = repr(data) if isinstance(data, str) and len(data) < 40 else kinds.get(type(data), "null")
    return BadData(f"{where or 'it'} is {found} instead of {wanted}")
