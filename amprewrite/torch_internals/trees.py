"""Functions of torch's pytrees, which take nested lists, tuples and dicts apart into leaves and put them together again."""

from typing import Any

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_map_only, tree_unflatten

_LISTS, _DICTS = {tuple, list, immutable_list}, {dict, immutable_dict}
_LEAVES = {type(None), bool, int, float, str, torch.fx.Node, torch.dtype, torch.device}


def tree_leaves(value: Any) -> list[Any]:
    """Return the leaves of `value`, like torch's pytree function of this name, but about ten times as fast for the most common classes."""
    found: list[Any] = []
    _gather(value, found)
    return found


def _gather(value: Any, found: list[Any]) -> None:
    kind = type(value)
    if kind in _LISTS or kind in _DICTS:
        for each in value if kind in _LISTS else value.values():
            if type(each) in _LEAVES:  # most elements are leaves: a call of `_gather` for each would take most of the time
                found.append(each)
            else:
                _gather(each, found)
    elif kind in _LEAVES or isinstance(value, torch.Tensor):
        found.append(value)
    else:  # let torch decide, because the class may be registered as a pytree
        found += _pytree.tree_leaves(value)


__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
