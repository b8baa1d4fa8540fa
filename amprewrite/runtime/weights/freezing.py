"""Freeze a rewritten model for inference: store each weight in the format in which the graphs read it.

"Low" means the low format of the plan: bf16 or fp16.

1. A weight that every graph reads low is replaced by its low copy, and its fp32 values are dropped. A weight that is read low and in
   fp32 is stored in both formats, so that no call casts it. A weight that is read only in fp32, or not at all, stays fp32.
2. No parameter of a frozen model requires gradients. All parameters are new objects, so that the original model does not change. If the
   rewrite was not in place, the fp32 values that stay are copied, and so are buffers: training the original changes no frozen model.
3. All graphs are captured anew. They compute the same numbers as before, because a low copy holds the result of the former cast.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from amprewrite.graphs.fx.ops.pad_ops import pad_cast
from amprewrite.graphs.fx.weights.frozen_weight import REMEDY, FrozenWeight, with_attributes
from amprewrite.passes.lower.hoist_weight_casts import Copy
from amprewrite.runtime.options import is_sharded
from amprewrite.runtime.training.optimizers.find_optimizers import every_optimizer
from amprewrite.tables.boundary.members import buffers_in, named_buffers_in, named_parameters_in, parameters_in
from amprewrite.tables.errors import AmpRewriteWarning, PlanError, PolicyError
from amprewrite.torch_internals.trees import tree_leaves

Reads = Mapping[str, frozenset[Copy | None]]
"""How one graph reads weights: {path: set of the low copies (dtype, layout) that it makes of the weight; None for a read in fp32}."""


def frozen_in(model: nn.Module) -> dict[str, FrozenWeight]:
    """Return the frozen weights of a model by name. A tied weight appears under each of its names."""
    return {name: each for name, each in named_parameters_in(model, remove_duplicate=False) if isinstance(each, FrozenWeight)}


def refuse_frozen(model: nn.Module, what: str) -> None:
    """Raise PolicyError if the model is frozen. `what` names the action that needs the fp32 values, such as "restoring it"."""
    if frozen_in(model):
        raise PolicyError(
            f"this {type(model).__name__} is frozen, and {what} needs its fp32 weights; call amp.unfreeze(state_dict) with them first, "
            "or amp.unfreeze() to go on with the rounded values"
        )


def check_freezable(model: nn.Module) -> None:
    """Raise PolicyError if the model is in training mode, is frozen already, is sharded, or has parameters of a class such as DTensor."""
    if frozen_in(model):
        raise PolicyError(f"this {type(model).__name__} is frozen already; amp.unfreeze(state_dict) takes the fp32 weights back")
    if model.training:
        raise PolicyError("freeze() is for inference: call amp.eval() first, so that the graphs that count are captured")
    if any(map(is_sharded, model.modules())) or any(type(each) not in (Tensor, nn.Parameter) for each in parameters_in(model)):
        raise PolicyError(
            "freeze() takes plain parameters, and some of these belong to a tensor class such as DTensor: gather the weights of a model "
            "that FSDP shards into a plain one (get_model_state_dict with full_state_dict=True), and rewrite and freeze that"
        )


def freeze_weights(model: nn.Module, reads: Iterable[Reads], shared: bool) -> tuple[str, ...]:
    """Replace each parameter of `model` in place: by its low copy, if graphs make just one, otherwise by a new parameter with its values.

    `reads` says for each graph how it reads weights. If another model has the same parameters and buffers (`shared`), buffers and values
    that stay fp32 are copied. The copies take additional memory as long as the other model exists. Returns the names of the parameters
    that get no low copy and required gradients before: the argument `took` of `unfreeze_weights`.
    """
    weights = dict(named_parameters_in(model, remove_duplicate=False))
    wanted: dict[int, set[Copy | None]] = {id(each): set() for each in weights.values()}
    for region in reads:
        for name, asked in region.items():
            if name in weights:
                wanted[id(weights[name])] |= asked
    copies = {number: found for number, found in ((id(each), _copy_of(each, wanted[id(each)])) for each in weights.values()) if found}
    copies = _whole_storages(weights.values(), copies)
    took = tuple(name for name, each in weights.items() if each.requires_grad and id(each) not in copies)
    made: dict[int, Tensor] = {}
    for name in list(weights):
        weight = weights.pop(name)
        if id(weight) not in made:
            found = copies.get(id(weight))
            values = weight.detach().clone() if shared and (found is None or None in wanted[id(weight)]) else weight.detach()
            made[id(weight)] = _constant(weight, values) if found is None else _frozen(weight, found, values, None in wanted[id(weight)])
            _replace(model, weight, made[id(weight)])
    if shared:
        _copy_buffers(model)
    return took


def _copy_of(weight: Tensor, wanted: set[Copy | None]) -> Copy | None:
    """Return the low copy (dtype, layout) to store in place of `weight`. `wanted`: all copies that graphs make of `weight`.

    None in `wanted` means that a graph reads the weight in fp32. The result is None if graphs make no low copy or different low copies, or
    if the weight is not a dense fp32 tensor with values.
    """
    low = [copy for copy in wanted if copy is not None]
    dense = weight.layout is torch.strided and torch.empty_like(weight, device="meta").stride() == weight.stride()
    if len(low) != 1 or weight.dtype != torch.float32 or not dense or not weight.numel() or weight.device.type == "meta":
        return None
    return low[0]


def _whole_storages(weights: Iterable[Tensor], copies: dict[int, Copy]) -> dict[int, Copy]:
    """Return `copies` (id of a weight → low copy) without the weights that share memory with another weight.

    Freezing such a weight would free no memory, because the other weight keeps the fp32 values.
    """
    by_storage: dict[int, list[Tensor]] = {}
    for weight in {id(each): each for each in weights}.values():
        by_storage.setdefault(weight.untyped_storage()._cdata, []).append(weight)
    apart = {id(each) for group in by_storage.values() if len(group) == 1 for each in group}
    return {number: copy for number, copy in copies.items() if number in apart}


def _frozen(weight: Tensor, copy: Copy, values: Tensor, high: bool) -> FrozenWeight:
    """Return a frozen weight: it stores `values`, the values of `weight`, cast to the dtype of `copy` and padded to its layout.

    It has the attributes of `weight`. If `high` is True, it also keeps the fp32 `values`.
    """
    with torch.no_grad(), torch.inference_mode(False):
        stored = pad_cast(values, *copy).requires_grad_(weight.requires_grad)
        kept = values if high else None
        return with_attributes(FrozenWeight(stored, weight.size(), weight.stride(), copy[1], kept, weight.requires_grad), weight)


def _constant(weight: Tensor, values: Tensor) -> Tensor:
    """Return a new parameter that holds `values`, has the attributes of `weight`, and requires no gradients."""
    return with_attributes(nn.Parameter(values, requires_grad=False), weight)


def _copy_buffers(model: nn.Module) -> None:
    """Replace each buffer of `model`, in place, by a copy of it."""
    copies = {buffer: buffer.detach().clone() for buffer in buffers_in(model)}
    for module in model.modules():
        module._buffers.update({name: copies[buffer] for name, buffer in module._buffers.items() if buffer is not None})


def _replace(model: nn.Module, old: Tensor, new: Tensor) -> None:
    """Replace the parameter `old` by `new` in all modules of `model`."""
    for module, name in list(_places(model, old)):
        setattr(module, name, new)  # setattr also updates the list of weights that an LSTM keeps
        if isinstance(module, nn.RNNBase):  # setattr does not update an LSTM's weak references to its weights
            module._flat_weight_refs = [None if each is None else weakref.ref(each) for each in module._flat_weights]


def _places(model: nn.Module, weight: Tensor) -> Iterator[tuple[nn.Module, str]]:
    """Yield each module that has `weight` as a parameter, with the name of the parameter."""
    for module in model.modules():
        yield from ((module, name) for name, each in module._parameters.items() if each is weight)


def unfreeze_weights(model: nn.Module, took: tuple[str, ...], values: Mapping[str, Any] | None) -> list[str]:
    """Make the parameters of a frozen model fp32 again, in place, and return the names of the weights whose values stay rounded.

    `values`: a state dict with the fp32 values. Buffers and other parameters in it are loaded, too. If `values` is None, each weight gets
    the fp32 values that it kept, or its low values cast to fp32. `took`: the result of `freeze_weights`, names of parameters that
    require gradients again. Raises PlanError, before any change, if `values` lacks a frozen weight or has a tensor in another shape.
    """
    frozen = frozen_in(model)
    names: dict[int, list[str]] = {}
    for name, weight in frozen.items():
        names.setdefault(id(weight), []).append(name)
    sources = {number: _source(aliases, frozen[aliases[0]], values) for number, aliases in names.items()}
    rounded = [aliases[0] for number, aliases in names.items() if _loses(frozen[aliases[0]], sources[number])]
    every = *named_parameters_in(model, remove_duplicate=False), *named_buffers_in(model, remove_duplicate=False)
    others = {name: each for name, each in every if name not in frozen}
    given = {name: _source([name], each, values) for name, each in others.items() if values is not None and name in values}
    for number, aliases in names.items():
        weight, source = frozen[aliases[0]], sources[number]
        made = weight.thawed() if source is None else torch.empty_strided(weight.size(), weight.stride(), device=weight.device)
        if source is not None:
            made.copy_(source.detach())
        _replace(model, weight, with_attributes(nn.Parameter(made, requires_grad=weight.trains), weight))
    with torch.no_grad():
        for name, source in given.items():
            others[name].copy_(source)  # type: ignore[arg-type]
    for name in took:
        if name in others and not others[name].requires_grad:
            others[name].requires_grad_()
    return rounded


def _loses(weight: FrozenWeight, source: Tensor | None) -> bool:
    """True if the fp32 weight that replaces the frozen `weight` will have rounded values instead of the original fp32 values.

    The new weight gets the values of `source`, a tensor of a state dict. If `source` is None, it gets the values stored in `weight`.
    """
    return not weight.exact if source is None else source.dtype == weight.stored.dtype


def _source(names: list[str], weight: Tensor, values: Mapping[str, Any] | None) -> Tensor | None:
    """Return the tensor in `values` under one of the `names` of a weight; None if `values` is None.

    Raises PlanError if `values` has no such tensor, or a tensor of another shape.
    """
    if values is None:
        return None
    found = next((values[name] for name in names if name in values), None)
    if not isinstance(found, Tensor):
        raise PlanError(f"the state_dict has no {names[0]}, which is frozen; give one with the fp32 values of all weights")
    if found.shape != weight.shape:
        raise PlanError(f"{names[0]} is {tuple(weight.shape)} here and {tuple(found.shape)} in the state_dict; give that of this model")
    return found


# -- checks in calls of a frozen model --------------------------------------------------------
def refuse_training(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise PolicyError if a frozen model is called as in training: in training mode, with grad mode on.

    If a parameter or an argument requires gradients, the call is allowed, because its backward has gradients to compute.
    """
    if not (model.training and torch.is_grad_enabled()):
        return
    given = (*parameters_in(model), *tree_leaves((args, dict(kwargs))))
    if not any(isinstance(each, Tensor) and each.requires_grad for each in given):
        raise PolicyError(
            f"{type(model).__name__} is frozen: no parameter takes a gradient, so it cannot be trained; call amp.eval() to use it, and "
            f"to train it {REMEDY}"
        )


def lost_values(model: nn.Module, reads: Reads, place: str) -> str:
    """Return the warning that a graph reads weights in fp32 although freezing has dropped their fp32 values; "" if it reads no such weight.

    `reads`: how the graph reads the weights. `place`: the name of the captured code, for the message.
    """
    frozen = {name for name, each in frozen_in(model).items() if not each.exact}
    lost = [name for name, copies in reads.items() if name in frozen and None in copies]
    if not lost:
        return ""
    more = f" and {len(lost) - 1} more weights" if lost[1:] else ""
    return (
        f"{place} reads {lost[0]}{more} in fp32 here, of which freeze() kept low values alone: they "
        "are cast up. Call freeze() after a call of each kind, so that it sees what they read; unfreeze(state_dict) takes fp32 back"
    )


@contextmanager
def without_frozen_weights(model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context manager that hides the frozen weights of a model from code that changes all its tensors, such as `to(device)`.

    After the `with` block, each frozen weight is replaced by `change(weight)`, which is called once for each weight.
    """
    frozen = {id(each): each for each in frozen_in(model).values()}
    held = [(*place, each) for each in frozen.values() for place in _places(model, each)]
    for module, name, _ in held:
        module._parameters[name] = None
    changed: dict[int, Tensor] = {}
    try:
        yield
        with torch.no_grad():
            for number, weight in frozen.items():
                found = change(weight)
                changed[number] = found if isinstance(found, FrozenWeight) else nn.Parameter(found, requires_grad=False)
    finally:
        for module, name, weight in held:
            setattr(module, name, changed.get(id(weight), weight))


def warn_of_optimizers(model: nn.Module) -> None:
    """Warn for each optimizer that has parameters of `model`, because `freeze()` is about to replace them."""
    own = {id(each) for each in parameters_in(model)}
    for optimizer in every_optimizer():
        if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
            warnings.warn(
                f"{type(optimizer).__name__} steps the parameters that freeze() replaces: it keeps their memory, and its steps do not "
                "reach the frozen model; drop it, or amp.unfreeze(state_dict) and make another to train on",
                AmpRewriteWarning, stacklevel=4,
            )  # fmt: skip


FROZEN = "frozen: "
"""First word of the plan's note on a frozen model, by which the note is found again."""


def frozen_weights_note(model: nn.Module) -> str:
    """Return the plan's note on a frozen model: how many of its weights are stored low, and how many bytes all weights hold."""
    every = {id(each): each for each in parameters_in(model)}.values()
    frozen = [each for each in every if isinstance(each, FrozenWeight)]
    both = sum(each.exact for each in frozen)
    held, before = sum(each.nbytes for each in every), sum(each.numel() * 4 for each in every)
    beside = f", {both} of them beside fp32" if both else ""
    return f"{FROZEN}{len(frozen)} of {len(every)} weights are stored low{beside}; they hold {held:,} bytes instead of {before:,}"


# -- state dicts of a frozen model ------------------------------------------------------------
def brings_fp32(model: nn.Module, state: Mapping[str, Any]) -> bool:
    """True if a frozen weight has another dtype in `state` than in a state dict of `model`, for example fp32 instead of bf16."""
    frozen = frozen_in(model)
    return any(name in state and getattr(state[name], "dtype", None) != each.low_dtype for name, each in frozen.items())


def not_brought(model: nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Return the names of frozen weights that the state dict `state` lacks: it has no tensor of their shape under any name of theirs."""
    frozen = frozen_in(model)
    brought = {id(each) for name, each in frozen.items() if getattr(state.get(name), "shape", None) == each.shape}
    return {name for name, each in frozen.items() if id(each) not in brought}


def warn_of_rounded(names: list[str]) -> None:
    """Warn, if `names` is not empty, that these weights became fp32 again with rounded values."""
    if names:
        which = f"{names[0]} and {len(names) - 1} more weights are" if len(names) > 1 else f"{names[0]} is"
        warnings.warn(
            f"{which} fp32 again with the low values that were stored: what freeze() rounded off is lost; "
            "amp.unfreeze(state_dict) takes fp32 values", AmpRewriteWarning, stacklevel=3,
        )  # fmt: skip


def give_stored(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace each frozen weight in `state` by a plain tensor of its stored values. A `state_dict` hook of modules with frozen weights.

    The tensor is fp32 if the weight kept its fp32 values, otherwise bf16 or fp16.
    """
    for name, weight in module._parameters.items():
        if isinstance(weight, FrozenWeight) and isinstance(state.get(prefix + name), FrozenWeight):
            state[prefix + name] = weight.low() if weight.high is None else weight.high


def hook_states(model: nn.Module, frozen: bool) -> None:
    """Add the hook `give_stored`, which puts plain tensors for frozen weights into state dicts of `model`. If not `frozen`, remove it."""
    for module in model.modules():
        held = any(isinstance(each, FrozenWeight) for each in module._parameters.values())
        known = [key for key, hook in module._state_dict_hooks.items() if hook is give_stored]
        for key in known:
            del module._state_dict_hooks[key]
        if held and frozen:
            module.register_state_dict_post_hook(give_stored)
