"""Our `tree_leaves` gives the leaves that pytree gives."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree

from amprewrite.torch_internals.trees import tree_leaves

Pair = namedtuple("Pair", "first second")


class Registered:
    """A class of a user that pytree takes apart."""

    def __init__(self, *inside: object) -> None:
        self.inside = inside

    def __repr__(self) -> str:
        return f"Registered{self.inside}"  # the same in each process, as the name of a test must be


_pytree.register_pytree_node(Registered, lambda value: (list(value.inside), None), lambda inside, _: Registered(*inside))

VALUES = [
    None, 1.5, torch.float32, slice(1, None), torch.ones(2), torch.nn.Parameter(torch.ones(2)), [], {}, (1, [2, (3, None)]),
    {"b": 1, "a": [2, {"c": "d"}]}, OrderedDict(b=1, a=2), Pair(1, [2]), torch.Size([1, 2]), torch.tensor([2.0, 1.0]).sort(),
    immutable_list([1, immutable_dict(a=immutable_list([2]))]), Registered(1, (2, Registered(3))), [Registered(1), {1, 2}],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_leaves_are_those_of_pytree(value: object) -> None:
    want, got = _pytree.tree_leaves(value), tree_leaves(value)
    assert [id(each) if isinstance(each, torch.Tensor) else each for each in got] == [
        id(each) if isinstance(each, torch.Tensor) else each for each in want
    ]
