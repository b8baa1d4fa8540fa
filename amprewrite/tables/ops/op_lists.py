"""Op names and op lists: the name of every op, and its kind in each preset.

`op_name` maps the targets of fx nodes (torch functions, methods, operators, ATen overloads) to one vocabulary, `OPS` holds a row for every
name of it, and `op_lists` returns the lists of a preset for a format and a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from amprewrite.tables.boundary.arguments import did_you_mean, shown
from amprewrite.tables.errors import OpListError
from amprewrite.tables.formats import Format
from amprewrite.tables.ops import list_presets
from amprewrite.tables.ops.op_row import Op, Trait
from amprewrite.tables.ops.op_table import ROWS
from amprewrite.tables.vocabulary import OpKind
from amprewrite.torch_internals.operators import OpOverload, OpOverloadPacket

__all__ = ["OPS", "PRESETS", "Op", "OpLists", "Trait", "find_op", "is_inplace", "op_lists", "op_name", "ops_with"]

Rule = Literal["cost", "tf", "autocast", "all-low"]


def index_rows(rows: Iterable[Op]) -> tuple[dict[str, Op], dict[str, Op]]:
    """(rows by name, rows by name or spelling). OpListError if two rows claim the same word."""
    by_name: dict[str, Op] = {}
    by_word: dict[str, Op] = {}
    for row in rows:
        for word in (row.name, *row.spellings):
            if word in by_word:
                first = by_word[word]
                raise OpListError(
                    f"{word!r} stands on the {first.kind.value}list (row {first.name!r}) and on the {row.kind.value}list "
                    f"(row {row.name!r}); keep one of the two in amprewrite/tables/ops/rows"
                )
            by_word[word] = row
        by_name[row.name] = row
    return by_name, by_word


OPS, _BY_WORD = index_rows(ROWS)


def find_op(name: str) -> Op | None:
    """The row of the op called or spelled `name`; None for an op that is on no list."""
    return _BY_WORD.get(name)


@cache
def ops_with(*traits: Trait) -> frozenset[str]:
    """Names of the ops that have one of `traits`."""
    return frozenset(row.name for row in ROWS if not row.traits.isdisjoint(traits))


# Names ---------------------------------------------------------------------------------------------------------------

_OPERATORS = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "inv": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "pos": "positive",
    "length_hint": "len",
    "long": "int",
    "nonzero": "bool",
    "index": "index_of",
    "concat": "list",
    "indexOf": "contains",
}
"""Python's operators (operator.truediv, __truediv__) with another name in ATen. The rest have ATen's name already."""

_REFLECTED = ("add", "and", "div", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "truediv", "xor")
_INPLACE = frozenset(
    ("add", "and", "div", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor", "concat")
)
_WRITES = frozenset({"setitem", "delitem", "__setitem__", "__delitem__"})

_HOMES = ("torch", "builtins", "math", "_operator", "operator")
"""Modules whose functions have the vocabulary's meaning; a user's own `linear` is not torch's."""

_PREFIXES = {
    "torch.masked": "masked_",
    "torch.sparse": "sparse_",
    "torch.signal": "signal_",
    "torch.distributed": "distributed_",
    "torch.nn.parallel": "parallel_",
}
"""Python modules with functions that share a name with an op but differ from it."""


def _operator_name(bare: str) -> str:
    """Vocabulary name of a Python operator: its dunder, or its name in `operator`, without underscores."""
    if bare == "rsub":
        return "rsub"
    if (bare[:1] == "r" and bare[1:] in _REFLECTED) or (bare[:1] == "i" and bare[1:] in _INPLACE):
        bare = bare[1:]
    return _OPERATORS.get(bare, bare)


@cache
def _method_name(name: str) -> str:
    """Vocabulary name of a Tensor method, or of a function by its bare name."""
    if name.startswith("__") and name.endswith("__"):
        if name in _BY_WORD:
            return _BY_WORD[name].name
        return _operator_name(name[2:-2])
    if name.endswith("_") and not name.endswith("__") and len(name) > 1:
        name = name[:-1]
    row = _BY_WORD.get(name)
    return row.name if row is not None else name


def op_name(target: Any) -> str:
    """Vocabulary name of an fx node's target, or of a method name.

    Takes torch functions, Tensor methods, operators and ATen overloads. A spelling gives the name of its row, and the in-place underscore
    is dropped. A function that is not torch's gives its plain name, or module.name if that would be mistaken for an op.
    """
    if isinstance(target, str):
        return _method_name(target)
    return _target_name(target, getattr(target, "__name__", None) or type(target).__name__)


@cache
def _target_name(target: Any, name: str) -> str:
    # The name is part of the cache key: builtins that share a C function compare equal (torch.mm == torch.spmm).
    if isinstance(target, OpOverload):
        return _schema_name(target._schema.name)
    if isinstance(target, OpOverloadPacket):
        return _schema_name(target._qualified_op_name)
    if name == "__get__":  # the getter of a property: torch.Tensor.T.__get__
        return _method_name(getattr(target.__self__, "__name__", name))
    module = getattr(target, "__module__", None) or ""
    if module in ("_operator", "operator"):
        return _operator_name(name.strip("_"))
    for home, prefix in _PREFIXES.items():
        if module.startswith(home):
            return _method_name(prefix + name)
    plain = _method_name(name)
    if module and module.partition(".")[0] not in _HOMES and plain in OPS:
        return f"{module}.{name}"
    return plain


def _schema_name(qualified: str) -> str:
    """Vocabulary name of "aten::add_"; ops of other libraries keep their qualified name."""
    library, _, name = qualified.partition("::")
    return _method_name(name) if library in ("aten", "prims") else qualified


@cache
def is_inplace(target: Any) -> bool:
    """True if calling `target` writes to its first argument, or to `out`.

    True for add_, operator.iadd, setitem and ATen overloads with such a schema. relu(inplace=True) is an argument of the call and not seen
    here.
    """
    if isinstance(target, OpOverload):
        arguments = target._schema.arguments
        return any(
            argument.alias_info is not None and argument.alias_info.is_write and (position == 0 or argument.kwarg_only)
            for position, argument in enumerate(arguments)
        )
    if isinstance(target, OpOverloadPacket):
        name = target._qualified_op_name.partition("::")[2]
    elif isinstance(target, str):
        name = target
    else:
        name = getattr(target, "__name__", "")
        if getattr(target, "__module__", None) in ("_operator", "operator"):
            return name in _WRITES or (name[:1] == "i" and name[1:] in _INPLACE)
    if name in _WRITES:
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name[3:-2] in _INPLACE
    return name.endswith("_") and not name.endswith("__")


# Lists ---------------------------------------------------------------------------------------------------------------


def _known(op: str) -> str:
    """The vocabulary name of `op`, or OpListError with near misses."""
    row = _BY_WORD.get(op)
    if row is not None:
        return row.name
    hint = did_you_mean(op, _BY_WORD, "; amprewrite.tables.ops.op_lists.OPS names all ops", likeness=0.6)
    raise OpListError(f"there is no op named {shown(op)}{hint}")


@dataclass(frozen=True)
class OpLists:
    """The kind of each op, and the rule that paints with these lists."""

    name: str
    rule: Rule
    """cost: the default planner; tf: TensorFlow's grappler; autocast: torch.autocast, op by op; all-low: all low except denied ops."""
    kinds: Mapping[str, OpKind] = field(hash=False)
    """Vocabulary name → kind. An op that is missing stays high, or under rule "autocast" follows its inputs."""
    promote: frozenset[str] = frozenset()
    """Rule "autocast": ops that take the widest of their inputs."""
    infer_after_allow: bool = True
    """Rule "tf": an infer op right after an allow op becomes low, too (TensorFlow since 2025)."""
    asked: frozenset[str] = frozenset()
    """Ops that `moved` put on their list: the user asked, so no fact about a single call overrules them."""

    def kind(self, op: str) -> OpKind | None:
        """Kind of the op called or spelled `op`; None if it is on no list."""
        kind = self.kinds.get(op)
        if kind is not None or op not in _BY_WORD:
            return kind
        return self.kinds.get(_BY_WORD[op].name)

    def moved(self, op: str, kind: OpKind) -> OpLists:
        """A copy with one op on another list; OpListError with near misses if there is no such op."""
        name = _known(op)
        return replace(self, kinds={**self.kinds, name: kind}, promote=self.promote - {name}, asked=self.asked | {name})

    @classmethod
    def from_sets(
        cls,
        name: str,
        *,
        allow: Iterable[str] = (),
        infer: Iterable[str] = (),
        clear: Iterable[str] = (),
        deny: Iterable[str] = (),
        internal: Iterable[str] = (),
        rule: Rule = "cost",
    ) -> OpLists:
        """Lists made of sets of op names; OpListError if an op is unknown or on two lists."""
        kinds: dict[str, OpKind] = {}
        sets = {
            OpKind.ALLOW: allow,
            OpKind.INFER: infer,
            OpKind.CLEAR: clear,
            OpKind.DENY: deny,
            OpKind.INTERNAL: internal,
        }
        for kind, ops in sets.items():
            for op in ops:
                known = _known(op)
                if kinds.get(known, kind) is not kind:
                    spelled = f"{shown(op)}" if op == known else f"{shown(op)} (a spelling of {known!r})"
                    raise OpListError(
                        f"{spelled} stands on the {kinds[known].value}list and on the {kind.value}list of {name!r}; "
                        "keep one of the two"
                    )
                kinds[known] = kind
        return cls(name, rule, kinds)


def _default(fmt: Format, device: str) -> OpLists:
    kinds = {row.name: (row.narrow if fmt.narrow and row.narrow else row.kind) for row in ROWS}
    return OpLists("default", "cost", kinds)


def _tf(fmt: Format, device: str) -> OpLists:
    return OpLists("tf", "tf", list_presets.tf_kinds(fmt.narrow, device))


def _autocast(fmt: Format, device: str) -> OpLists:
    return OpLists("autocast", "autocast", list_presets.autocast_kinds(device), list_presets.AUTOCAST_PROMOTE[device])


def _o2(fmt: Format, device: str) -> OpLists:
    """Everything low except batch norm (Apex's keep_batchnorm_fp32)."""
    return OpLists("o2", "all-low", _all_low() | {"batch_norm": OpKind.DENY})


def _o3(fmt: Format, device: str) -> OpLists:
    return OpLists("o3", "all-low", _all_low())


def _all_low() -> dict[str, OpKind]:
    """All ops low except `binary_cross_entropy`, which reads the rest to one and divides by 1e-12 at least. Apex refuses it, too."""
    return dict.fromkeys(OPS, OpKind.ALLOW) | {"binary_cross_entropy": OpKind.DENY}


PRESETS = {"default": _default, "tf": _tf, "autocast": _autocast, "o2": _o2, "o3": _o3}


@cache
def _preset(preset: str, fmt: Format, device: str) -> OpLists:
    return PRESETS[preset](fmt, device)


def op_lists(preset: str | OpLists, fmt: Format, device: str) -> OpLists:
    """The lists of a preset for a format and a device. An OpLists is returned unchanged.

    Any device but "cpu" has the lists of "cuda". Raises OpListError for an unknown preset.
    """
    if isinstance(preset, OpLists):
        return preset
    if preset not in PRESETS:
        raise OpListError(f"lists={shown(preset)} is no preset; use one of {', '.join(PRESETS)}, or OpLists of your own")
    return _preset(preset, fmt, "cpu" if device.partition(":")[0] == "cpu" else "cuda")
