"""Op names and op lists: one name for each op, and its kind (allow, infer, clear, deny, internal) in each preset.

`op_name` maps the targets of fx nodes (torch functions, methods, operators, ATen overloads) to one set of names, the *vocabulary*. `OPS`
holds a row for every name of the vocabulary, and `op_lists` returns the lists of a preset for a format and a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from amprewrite.tables.boundary.arguments import did_you_mean, shown
from amprewrite.tables.errors import OpListError
from amprewrite.tables.formats import Format
from amprewrite.tables.ops import list_presets
from amprewrite.tables.ops.op_row import Op, Trait
from amprewrite.tables.ops.rows import allow, clear, deny, infer, internal
from amprewrite.tables.ops.rows.traits import TRAITS
from amprewrite.tables.vocabulary import OpKind
from amprewrite.torch_internals.operators import OpOverload, OpOverloadPacket

__all__ = ["OPS", "PRESETS", "Op", "OpLists", "Trait", "find_op", "is_inplace", "op_lists", "op_name", "ops_with"]

Rule = Literal["cost", "tf", "autocast", "all-low"]


def with_traits(rows: Sequence[Op], traits: Mapping[Trait, str]) -> Iterator[Op]:
    """Return a copy of each row with its traits filled in. `traits` maps a trait to the names of its ops, separated by spaces.

    Raises OpListError if a trait names an op that has no row.
    """
    found: dict[str, set[Trait]] = {row.name: set() for row in rows}
    for trait, names in traits.items():
        for name in names.split():
            if name not in found:
                raise OpListError(f"{name!r} is said to be {trait.name} in amprewrite/tables/ops/rows/traits.py, but has no row")
            found[name].add(trait)
    return (replace(row, traits=frozenset(found[row.name])) for row in rows)


ROWS = tuple(with_traits((*allow.ROWS, *internal.ROWS, *infer.ROWS, *clear.ROWS, *deny.ROWS), TRAITS))
"""The complete op table: a row for every op that amprewrite knows, with its traits."""


def index_rows(rows: Iterable[Op]) -> tuple[dict[str, Op], dict[str, Op]]:
    """Return two dicts, {name: row} and {name or other spelling: row}. Raises OpListError if two rows have a name or spelling in common."""
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
    """Return the row of the op whose name or spelling is `name`; None if there is none."""
    return _BY_WORD.get(name)


@cache
def ops_with(*traits: Trait) -> frozenset[str]:
    """Return the names of the ops that have at least one of `traits`."""
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
"""Name of a Python operator, such as "truediv" → name in the vocabulary, such as "div". Operators whose names are the same are left out."""

_REFLECTED = ("add", "and", "div", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "truediv", "xor")
_INPLACE = frozenset(
    ("add", "and", "div", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor", "concat")
)
_WRITES = frozenset({"setitem", "delitem", "__setitem__", "__delitem__"})

_HOMES = ("torch", "builtins", "math", "_operator", "operator")
"""Modules whose functions count as ops by their name. In other modules, a function named `linear` may compute something else."""

_PREFIXES = {
    "torch.masked": "masked_",
    "torch.sparse": "sparse_",
    "torch.signal": "signal_",
    "torch.distributed": "distributed_",
    "torch.nn.parallel": "parallel_",
}
"""Python module → prefix for its functions: `torch.masked.sum` is "masked_sum" in the vocabulary, because "sum" is another op."""


def _operator_name(bare: str) -> str:
    """Return amprewrite's name of a Python operator. `bare` is the operator's bare name: "iadd" for `operator.iadd` or `__iadd__`."""
    if bare == "rsub":
        return "rsub"
    if (bare[:1] == "r" and bare[1:] in _REFLECTED) or (bare[:1] == "i" and bare[1:] in _INPLACE):
        bare = bare[1:]
    return _OPERATORS.get(bare, bare)


@cache
def _method_name(name: str) -> str:
    """Return amprewrite's name of the Tensor method or function `name`. If it has none, return `name` without an in-place underscore."""
    if name.startswith("__") and name.endswith("__"):
        if name in _BY_WORD:
            return _BY_WORD[name].name
        return _operator_name(name[2:-2])
    if name.endswith("_") and not name.endswith("__") and len(name) > 1:
        name = name[:-1]
    row = _BY_WORD.get(name)
    return row.name if row is not None else name


def op_name(target: Any) -> str:
    """Return amprewrite's name of the target of an fx node: a torch function, Tensor method, method name, operator or ATen overload.

    All spellings of an op give one name: `torch.add`, `x.add_` and `operator.add` give "add". A function from outside torch keeps its name,
    or becomes "module.name" if an op has the same name.
    """
    if isinstance(target, str):
        return _method_name(target)
    return _target_name(target, getattr(target, "__name__", None) or type(target).__name__)


@cache
def _target_name(target: Any, name: str) -> str:
    # `name` is a parameter so that the cache distinguishes builtins that share a C function and compare equal (torch.mm == torch.spmm).
    if isinstance(target, OpOverload):
        return _schema_name(target._schema.name)
    if isinstance(target, OpOverloadPacket):
        return _schema_name(target._qualified_op_name)
    if name == "__get__":  # the getter of a property, such as torch.Tensor.T.__get__: its `__self__` has the property's name
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
    """Return amprewrite's name of an operator: "add" for "aten::add_". For libraries other than aten and prims it is `qualified` itself."""
    library, _, name = qualified.partition("::")
    return _method_name(name) if library in ("aten", "prims") else qualified


@cache
def is_inplace(target: Any) -> bool:
    """True if a call of `target` writes to its first argument, or to a keyword argument such as `out`.

    True for add_, operator.iadd, setitem, and ATen overloads whose schema has such a write. False for relu, although relu(inplace=True)
    writes, because only the target is examined and no arguments.
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
    """Return amprewrite's name of `op`, a name or spelling. Raises OpListError, which suggests similar names, if there is no such op."""
    row = _BY_WORD.get(op)
    if row is not None:
        return row.name
    hint = did_you_mean(op, _BY_WORD, "; amprewrite.tables.ops.op_lists.OPS names all ops", likeness=0.6)
    raise OpListError(f"there is no op named {shown(op)}{hint}")


@dataclass(frozen=True)
class OpLists:
    """Op lists: the kind (allow, deny, ...) of each op, and the rule that turns kinds into formats, low (bf16, fp16) or fp32."""

    name: str
    rule: Rule
    """"cost": the default planner. "tf": the rule of TensorFlow's grappler pass. "autocast": the rule of torch.autocast, op by op.
    "all-low": all ops low except denied ops."""
    kinds: Mapping[str, OpKind] = field(hash=False)
    """amprewrite's name of an op → kind. An op that is missing stays fp32; with the rule "autocast" it has the format of its inputs."""
    promote: frozenset[str] = frozenset()
    """For the rule "autocast": ops that run in the widest format of their inputs."""
    infer_after_allow: bool = True
    """For the rule "tf": whether an INFER op directly after an ALLOW op becomes low as well, as in TensorFlow since 2025."""
    asked: frozenset[str] = frozenset()
    """Ops whose kind the user has set (see `moved`). Passes that turn low ops into fp32 skip them, unless a low kernel is missing."""

    def kind(self, op: str) -> OpKind | None:
        """Return the kind of the op whose name or spelling is `op`; None if it is on no list."""
        kind = self.kinds.get(op)
        if kind is not None or op not in _BY_WORD:
            return kind
        return self.kinds.get(_BY_WORD[op].name)

    def moved(self, op: str, kind: OpKind) -> OpLists:
        """Return a copy of the lists in which `op` (name or spelling) has the kind `kind`. Raises OpListError for an unknown op."""
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
        """Return op lists: ops named in the argument `allow` get the kind ALLOW, and likewise for the other kinds.

        Raises OpListError if an op is unknown, or is named in two of these arguments.
        """
        kinds: dict[str, OpKind] = {}
        sets = {OpKind.ALLOW: allow, OpKind.INFER: infer, OpKind.CLEAR: clear, OpKind.DENY: deny, OpKind.INTERNAL: internal}
        for kind, ops in sets.items():
            for op in ops:
                known = _known(op)
                if kinds.get(known, kind) is not kind:
                    spelled = f"{shown(op)}" if op == known else f"{shown(op)} (a spelling of {known!r})"
                    raise OpListError(
                        f"{spelled} stands on the {kinds[known].value}list and on the {kind.value}list of {name!r}; keep one of the two"
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
    """Return lists that run everything low except batch norm, as Apex's O2 does with keep_batchnorm_fp32."""
    return OpLists("o2", "all-low", _all_low() | {"batch_norm": OpKind.DENY})


def _o3(fmt: Format, device: str) -> OpLists:
    return OpLists("o3", "all-low", _all_low())


def _all_low() -> dict[str, OpKind]:
    """Return {op name: kind} for presets that run everything low: the kind is ALLOW, except DENY for `binary_cross_entropy`.

    Apex refuses this loss in fp16. Its term 1 - p is 0 if a low format rounds the probability p to 1. Its backward may divide by 1e-12.
    """
    return dict.fromkeys(OPS, OpKind.ALLOW) | {"binary_cross_entropy": OpKind.DENY}


PRESETS = {"default": _default, "tf": _tf, "autocast": _autocast, "o2": _o2, "o3": _o3}


@cache
def _preset(preset: str, fmt: Format, device: str) -> OpLists:
    return PRESETS[preset](fmt, device)


def op_lists(preset: str | OpLists, fmt: Format, device: str) -> OpLists:
    """Return the lists of a preset for the low format `fmt` and a device such as "cuda:0". An OpLists is returned unchanged.

    Devices other than CPUs have the lists of CUDA. Raises OpListError for an unknown preset.
    """
    if isinstance(preset, OpLists):
        return preset
    if preset not in PRESETS:
        raise OpListError(f"lists={shown(preset)} is no preset; use one of {', '.join(PRESETS)}, or OpLists of your own")
    return _preset(preset, fmt, "cpu" if device.partition(":")[0] == "cpu" else "cuda")
