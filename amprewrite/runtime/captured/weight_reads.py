"""Which weights a rewritten graph reads in the low format alone: those may be given to it rounded, and nothing changes.

A weight is read low if each of its readers is a cast that a pass put there; so it is in the body of a checkpoint. All else counts
as a read in fp32: what a view, an op or a function does with it is not looked into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn

from amprewrite.graphs.fx.node_facts import bodies, is_checkpoint
from amprewrite.graphs.fx.ops.pad_ops import pad_cast
from amprewrite.graphs.fx.ops.scale_ops import cast_in
from amprewrite.passes.apply.insert_casts import CAST
from amprewrite.tables.formats import Format


@dataclass(frozen=True)
class WeightReads:
    """The weights of one graph by path: those it casts to the low format and nothing else, and those it reads in fp32."""

    low: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()


def weight_reads(module: torch.fx.GraphModule, inputs: Sequence[Any], root: nn.Module, low: Format | None) -> WeightReads:
    """How an edited graph reads the weights of `root` among its `inputs`; without a `low` format all are read in fp32."""
    names: dict[int, list[str]] = {}
    for name, weight in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    reads: dict[bool, set[str]] = {True: set(), False: set()}
    for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=False):
        if node.users and id(value) in names:
            reads[low is not None and _reads_low(node, low.dtype)].update(names[id(value)])
    return WeightReads(frozenset(reads[True] - reads[False]), frozenset(reads[False]))


def _reads_low(source: torch.fx.Node, low: torch.dtype) -> bool:
    """Whether all that is done with `source` is to cast it to `low`."""
    return all(_is_cast(user, source, low) or _in_body(user, source, low) for user in source.users)


def _is_cast(user: torch.fx.Node, source: torch.fx.Node, low: torch.dtype) -> bool:
    return CAST in user.meta and user.target in ("to", pad_cast, cast_in) and user.args[0] is source and user.args[1] == low


def _in_body(user: torch.fx.Node, source: torch.fx.Node, low: torch.dtype) -> bool:
    """Whether `user` is a checkpoint whose body reads `source` low."""
    if not is_checkpoint(user):
        return False
    places = [place for place, operand in enumerate(user.args[1:]) if operand is source]
    inputs = [body.graph.find_nodes(op="placeholder") for body in bodies(user)]
    return bool(places and inputs) and all(place < len(each) and _reads_low(each[place], low) for each in inputs for place in places)


__all__ = ["WeightReads", "weight_reads"]
