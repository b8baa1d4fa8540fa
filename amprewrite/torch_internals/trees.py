"""Nested lists, tuples and dicts of tensors, by torch's pytrees."""

from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
