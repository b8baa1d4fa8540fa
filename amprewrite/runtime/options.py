"""The checked options of one `rewrite` call, the rules for planning that they give on a device, and the parts that are captured separately.

A part is a submodule that is captured separately. `granularity=` chooses the parts:

1. granularity="model": there are no parts. Dynamo captures the whole model, in as few graphs as it can.
2. granularity="blocks": each block is a part. A block is a module with submodules, in an nn.ModuleList, nn.Sequential or
   nn.ModuleDict that holds another module of the same class. Of blocks inside blocks only the outermost are parts.
3. granularity=[patterns]: each module whose path matches one of these shell patterns is a block.
4. If there are blocks, other modules with parameters, such as an embedding or a head, are parts, too: each outermost module that is
   outside of all blocks and contains no block.

Hooks on a part run outside its graph. FSDP2 needs this, because its hooks gather the weights of a block just before the block runs.
Code between the parts is not captured. It runs as written, in fp32.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from amprewrite.ir.evidence.agreed import NOTHING_AGREED, Agreed
from amprewrite.ir.evidence.ranges import Calibration, KeepHigh
from amprewrite.ir.plans.plan import ModelPlan
from amprewrite.ir.policies.policy import Override, PadPolicy, Policy, ProductPolicy
from amprewrite.tables.boundary.arguments import is_word, shown
from amprewrite.tables.boundary.members import parameters_in
from amprewrite.tables.devices import Device, best_format
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import BASE, FP32, Format
from amprewrite.tables.ops.op_lists import OpLists

MODEL, BLOCKS = "model", "blocks"
Granularity = str | tuple[str, ...]
"""A result of `parse_granularity`: MODEL, BLOCKS, or patterns of module paths."""


def is_sharded(module: nn.Module) -> bool:
    """True if the module itself went through FSDP2's `fully_shard`."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


def is_flattened(parameter: Tensor) -> bool:
    """True if FSDP1 manages the parameter. FSDP1 marks such parameters (torch.distributed.fsdp._common_utils)."""
    return getattr(parameter, "_fsdp_flattened", False)


def fsdp_groups(module: Any) -> list[Any]:
    """Return the FSDP2 parameter groups of `module`, each gathered by one all-gather; [] if `fully_shard` was not applied to `module`.
    Older versions of torch make at most one group for a module; newer versions may make several."""
    ask = getattr(module, "_get_fsdp_state", None)
    state = None if ask is None else ask()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def several_ranks() -> bool:
    """True if torch.distributed runs with more than one rank."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def sharded_inside(root: nn.Module, path: str) -> str:
    """Return advice to use granularity="blocks" if `fully_shard` was applied to a submodule of the module at `path`; otherwise ""."""
    above = f"{path}." if path else ""  # search by name, as the model may no longer have a module at `path`
    found = [name for name, module in root.named_modules() if name and name.startswith(above) and is_sharded(module)]
    return f"; {found[0][len(above):]} is sharded by itself, which takes rewrite(..., granularity='blocks')" if found else ""


def parse_granularity(granularity: Any, model: nn.Module) -> Granularity:
    """Check the argument `granularity` against `model`, and return "model", "blocks", or a tuple of patterns of module paths.

    Raises PolicyError if it is of another type, if `model` has no blocks, or if a pattern matches no module.
    """
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
    """Return the paths of the parts to rewrite separately, as `granularity` asks, in the order of `named_modules`; () for "model"."""
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
    """Return the paths of the outermost blocks that `granularity` ("blocks" or patterns) asks for.

    Raises PolicyError for a pattern that matches no module.
    """
    found = list(_repeated(model) if granularity == BLOCKS else _named(model, granularity))
    return tuple(path for path in found if not any(path != other and path.startswith(f"{other}.") for other in found))


def _repeated(model: nn.Module) -> Iterator[str]:
    """Yield the path of each module that has submodules and is in a ModuleList, Sequential or ModuleDict with another of the same class."""
    for path, holder in model.named_modules():
        if isinstance(holder, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            classes = Counter(type(child) for child in holder.children())
            for name, child in holder.named_children():
                if classes[type(child)] > 1 and next(child.children(), None) is not None:
                    yield f"{path}.{name}".lstrip(".")


def _named(model: nn.Module, patterns: Granularity) -> Iterator[str]:
    """Yield the paths of the modules that match `patterns`. Raises PolicyError if a pattern matches no module."""
    paths = [path for path, _ in model.named_modules() if path]
    for pattern in patterns:
        hits = [path for path in paths if fnmatchcase(path, pattern)]
        if not hits:
            near = difflib.get_close_matches(pattern, paths, 3, 0.3)
            raise PolicyError(f"granularity: no module is called {shown(pattern)}; near it are {', '.join(near) or 'none'}")
        yield from hits


@dataclass(frozen=True)
class Options:
    """The options of one `rewrite` call, checked."""

    low: Format | None
    """The low format. None: the best format for the device, or fp32 if no low format gains speed on it."""
    lists: str | OpLists = "default"
    overrides: tuple[Override, ...] = ()
    backend: str | Callable[..., Any] = "eager"
    cache_weights: bool | str = True
    """True: each call casts the weights anew, except calls without gradients in one `frozen_weights()` or `generate()`, which share low
    copies. "step": copies are kept until an optimizer steps, except in compiled graphs with gradients. False: no copy is kept."""
    strict: bool = False
    given: ModelPlan | None = None
    """A plan that the rewrite follows, for instance a saved one; None: the rewrite makes a plan."""
    granularity: Granularity = MODEL
    """The parts of the model that are captured separately: "model" (no parts), "blocks", or patterns of module paths."""
    calibration: Calibration | None = None
    keep_high: KeepHigh | None = None
    loss_scale: Any = "auto"
    """An argument of `parse_loss_scale`: "auto", a number, a preset, or a LossScale to share."""
    device: str = ""
    """The name of the device to plan for; "": the device that the model is on."""
    measure: bool = False
    """True: time ops and casts on the device. False: use the prices in the table of devices."""
    memory: float = 0.0
    """Price, in seconds, of each byte of activations that is kept for backward; 0: plan for speed alone."""
    parity: float | None = 1.0
    """A number w from 0 to 1: all graphs share one plan. Its cost is w times the cost of a training step plus 1 - w times the cost of a
    pass without gradients. None: each graph has its own plan."""
    pad: PadPolicy = field(default_factory=PadPolicy)
    products: ProductPolicy | None = None
    """Rules for the products (matmuls) that may read fp8 copies of their operands; None: no product runs in fp8."""
    frozen: tuple[str, ...] | None = None
    """Names of the fp32 parameters that took gradients before the model was frozen; None: the model is not frozen."""
    agreed: Agreed = NOTHING_AGREED
    """In a copy of a frozen model, the colours (low or high) of the original's ops, which stored weights do not show; otherwise empty."""


def policy_on(row: Device, options: Options, note: Callable[[str], None], kept: bool, products: ProductPolicy | None) -> Policy:
    """Return the rules by which the planner chooses formats, a `Policy`, made from `options` for the device `row`.

    Calls `note` with a message for each restriction, for example that the device gains no speed from a low format. `kept`: True in a `with`
    block that keeps low copies of weights, such as `frozen_weights()`. The planner then counts a cast of a weight as costing nothing.
    `products`: the rules of `options.products` that the kernels on the device can run (see `fp8_units.runnable`).
    """
    low = options.low
    if low is None:
        low = best_format(row)
        if low is None:
            note(f"left in fp32: {row.name} gains nothing from low precision; pass dtype='bf16' to rewrite anyway")
    elif low is not FP32 and low.name not in row.low_formats:
        note(f"{low.name} on {row.name}: done as asked, though its matrix units have no {low.name}")
    if products is not None and low != BASE:
        note(f"products: fp8 is made of {BASE.name} alone, and the low format on {row.name} is {(low or FP32).name}; none runs in fp8")
        products = None
    elif products is not None and products.preset.priced and not row.fp8:
        note(f"products: {row.name} multiplies no fp8, so products run in bf16; device='h100' plans for a device that does")
    return Policy(
        low or FP32, options.lists, options.overrides, keeps_copies=bool(options.cache_weights) and kept, device=options.device,
        measure=options.measure, memory=options.memory, parity=options.parity, products=products,
        may_decline=options.low is None and options.backend == "eager" and not options.overrides,
    )  # fmt: skip
