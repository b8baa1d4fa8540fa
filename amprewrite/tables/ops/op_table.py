"""The complete op table: a row for every op that amprewrite knows, with its traits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from amprewrite.tables.errors import OpListError
from amprewrite.tables.ops.op_row import Op, Trait
from amprewrite.tables.ops.rows import allow, clear, deny, infer, internal
from amprewrite.tables.ops.rows.traits import TRAITS


def with_traits(rows: Sequence[Op], traits: Mapping[Trait, str]) -> Iterator[Op]:
    """Return the rows, each with its traits. `traits` gives the names of the ops of each trait, separated by spaces.

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
