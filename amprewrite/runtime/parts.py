"""Where a model is cut into parts that are captured and rewritten one by one.

1. granularity="model": nowhere; capture takes in as much as it can.
2. granularity="blocks": a block is a module with modules of its own that stands beside another of its class in an
   nn.ModuleList, nn.Sequential or nn.ModuleDict; of blocks within blocks the outermost counts. Or the blocks are named, by
   shell patterns of module paths.
3. A module that holds no block and has parameters, such as an embedding or a head, is a part too.

Hooks on a part run outside its graph, as FSDP2 needs it: its hooks gather a block's weights just before the block runs.
Code between the parts runs as written, in fp32.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from amprewrite.tables.boundary.arguments import is_word, shown
from amprewrite.tables.boundary.members import parameters_in
from amprewrite.tables.errors import PolicyError

MODEL, BLOCKS = "model", "blocks"
Granularity = str | tuple[str, ...]


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shards the module."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


def is_flattened(parameter: Tensor) -> bool:
    """Whether FSDP1 manages the parameter, by the mark that it sets (torch.distributed.fsdp._common_utils)."""
    return getattr(parameter, "_fsdp_flattened", False)


def fsdp_groups(state: Any) -> list[Any]:
    """The groups of weights in FSDP2's state of a module, each gathered at once; earlier versions of torch have one at most."""
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def sharded_inside(root: nn.Module, path: str) -> str:
    """Advice for a model in which FSDP2 gathers weights inside the captured module at `path`; "" if it does not."""
    found = [name for name, module in root.get_submodule(path).named_modules() if name and is_sharded(module)]
    return f"; {found[0]} is sharded by itself, which takes rewrite(..., granularity='blocks')" if found else ""


def parse_granularity(granularity: Any, model: nn.Module) -> Granularity:
    """`granularity` checked against `model`: "model", "blocks", or patterns of module paths as a tuple."""
    if is_word(granularity, MODEL):
        return MODEL
    if isinstance(granularity, str) and granularity != BLOCKS:
        raise PolicyError(f"granularity={shown(granularity)} means nothing; use 'model', 'blocks', or a list of module paths")
    if not is_word(granularity, BLOCKS):
        if not isinstance(granularity, list | tuple) or not granularity or not all(isinstance(each, str) for each in granularity):
            raise PolicyError(f"granularity= takes 'model', 'blocks', or a list of module paths, not {shown(granularity)}")
        granularity = tuple(granularity)
    if not block_paths(model, granularity):
        raise PolicyError(
            f"granularity={shown(granularity)}: {type(model).__name__} has no list of blocks of one class; name them, as in "
            "granularity=['encoder.*', 'decoder.*'], or leave it out to rewrite the model whole"
        )
    return granularity  # type: ignore[no-any-return]


def part_paths(model: nn.Module, granularity: Granularity) -> tuple[str, ...]:
    """Paths of the parts to rewrite by themselves, in the order of `named_modules`; none for "model"."""
    if granularity == MODEL:
        return ()
    blocks = block_paths(model, granularity)
    above = {"", *(path[:cut] for path in blocks for cut, letter in enumerate(path) if letter == ".")}
    found: list[str] = []
    for path, module in model.named_modules():
        if path in above or any(path.startswith(f"{part}.") for part in found[-1:]):
            continue
        if path in blocks or next(parameters_in(module), None) is not None:
            found.append(path)
    return tuple(found)


def block_paths(model: nn.Module, granularity: Granularity) -> tuple[str, ...]:
    """Paths of the blocks; PolicyError for a pattern that matches no module."""
    found = list(_repeated(model) if granularity == BLOCKS else _named(model, granularity))
    return tuple(path for path in found if not any(path != other and path.startswith(f"{other}.") for other in found))


def _repeated(model: nn.Module) -> Iterator[str]:
    for path, holder in model.named_modules():
        if isinstance(holder, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            classes = Counter(type(child) for child in holder.children())
            for name, child in holder.named_children():
                if classes[type(child)] > 1 and next(child.children(), None) is not None:
                    yield f"{path}.{name}".lstrip(".")


def _named(model: nn.Module, patterns: Granularity) -> Iterator[str]:
    paths = [path for path, _ in model.named_modules() if path]
    for pattern in patterns:
        hits = [path for path in paths if fnmatchcase(path, pattern)]
        if not hits:
            near = difflib.get_close_matches(pattern, paths, 3, 0.3)
            raise PolicyError(f"granularity: no module is called {shown(pattern)}; near it are {', '.join(near) or 'none'}")
        yield from hits
