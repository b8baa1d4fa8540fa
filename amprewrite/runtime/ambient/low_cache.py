"""Store the keys and values of `generate()` (the KV cache) in the low format, such as bf16, in which the attention of the model reads them.

1. Only the model reads a cache that `generate()` makes. Before the first step the layers of the cache get a class that stores rounded
   tensors and returns fp32. Where the plan runs the attention low, the graph needs neither of these two casts, so no step casts the cache.
2. The cache rounds only values that the plan rounds anyway: if a graph reads keys or values in fp32, or if uncaptured code reads them, the
   layer stores fp32 again.
3. If a layer still exists when the call of `generate()` ends, it gets its former class again, and stores fp32.

Before each step, the sizes that vary (batch, prompt, length of the cache) are marked, so that Dynamo captures them as dynamic at once.
Without a mark Dynamo treats a size as fixed until it sees another value: the prompt and the steps of decoding would be captured again for
each new size. Sizes of 1 are not marked: PyTorch broadcasts these dims, so they need another graph than larger sizes.

Dynamo gives each marked size a separate symbol. With a different symbol in each layer, capture could not reuse the results for the ops of
one layer in the next. So all layers whose keys and values have the same length share one symbol for this length. Sizes that are
equal by chance, such as a batch of five with five keys, keep separate symbols, because a graph with one symbol for both would have to be
captured again at the next step. Sizes that Dynamo saw change in an earlier capture of the same code keep separate symbols, too.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amprewrite.graphs.fx.read.names import file_label
from amprewrite.ir.plans.plan import ModelPlan, NodePlan, RegionPlan
from amprewrite.runtime.ambient.hook_watch import any_global_hook
from amprewrite.tables.formats import FP32, Format
from amprewrite.tables.vocabulary import Colour

_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
"""Classes of transformers.cache_utils that store keys and values in the dtype of the tensors passed to them."""
_CACHES = ("self_attention_cache", "cross_attention_cache")
"""Attributes of the cache of an encoder-decoder model that hold its two inner caches."""
_INNER, _KEPT = "amprewrite_inner", "amprewrite_kept"
_IN_CACHE, _IN_STATES = (0, 2), (0, 1)
"""Dims of batch and length: in keys and values (batch × heads × length × width), and in hidden states (batch × length × width)."""
_SHARED = "amprewrite_shared"
"""Name of the attribute in which `mark_growing` stores, on keys and values, the dims that `shared_sizes` returns."""
_SOURCE = file_label(__file__)


class CacheReadHigh(Exception):
    """Raised during capture if a graph reads a low KV cache in fp32. `Session.step` catches it, and repeats the call with fp32 caches."""


class _KeepsLow:
    """Methods that make a layer of a KV cache store keys and values in the low format, and return them in fp32.

    The low tensors are in an inner layer, an object of the layer's former class. An update outside of a captured graph makes the layer
    store fp32 again.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        state: Any = self
        if not torch.compiler.is_compiling():
            hold_fp32(state)
            found: tuple[Tensor, Tensor] = state.update(key_states, value_states, *args, **kwargs)
            return found
        kept = state.amprewrite_kept
        keys, values = state.amprewrite_inner.update(key_states.to(kept), value_states.to(kept), *args, **kwargs)
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    @property
    def keys(self) -> Tensor | None:
        found: Tensor | None = self.amprewrite_inner.keys
        return None if found is None else found.to(self.dtype)

    @property
    def values(self) -> Tensor | None:
        found: Tensor | None = self.amprewrite_inner.values
        return None if found is None else found.to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__[_INNER], name)


@functools.cache
def _low_class(cls: type) -> type:
    """Return a subclass of the layer class `cls` that stores low keys and values in an inner `cls` object (see `_KeepsLow`)."""

    def passed_on(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.amprewrite_inner, name)(*args, **kwargs)

        return method

    own = {name: each for name, each in vars(_KeepsLow).items() if not name.startswith("__") or name == "__getattr__"}
    methods = {name: passed_on(name) for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name)) and name not in own}
    return type(cls.__name__, (cls,), {**methods, **own, "_layer_type": None, "__module__": cls.__module__, "__doc__": _KeepsLow.__doc__})


def caches_of(value: Any) -> Iterator[Any]:
    """Yield the KV caches that have layers: `value` itself, or its two inner caches if it is the cache of an encoder-decoder model."""
    if isinstance(getattr(value, "layers", None), list | tuple):
        yield value
    for name in _CACHES:
        if hasattr(value, name):
            yield from caches_of(getattr(value, name))


def layers_of(value: Any) -> Iterator[Any]:
    """Yield the layers of a cache and of its inner caches; nothing if `value` is no cache."""
    for cache in caches_of(value):
        yield from cache.layers


def tensors_of(layer: Any) -> tuple[Any, Any]:
    """Return (keys, values) as `layer` stores them. Each is None if it is missing, because `layer` may be any object."""
    inner = getattr(layer, "__dict__", {}).get(_INNER, layer)
    return getattr(inner, "keys", None), getattr(inner, "values", None)


def is_low(layer: Any) -> bool:
    """True if the layer stores its keys and values in the low format."""
    return _INNER in vars(layer)


def hold_low(layer: Any, dtype: torch.dtype) -> None:
    """Make an empty layer of a KV cache store all its later keys and values in `dtype`, by changing its class."""
    cls: Any = type(layer)
    inner = object.__new__(cls)
    inner.__dict__.update(vars(layer))
    layer.__dict__.clear()
    layer.__dict__.update({_INNER: inner, _KEPT: dtype})
    layer.__class__ = _low_class(cls)


def hold_fp32(layer: Any) -> None:
    """Undo `hold_low`: give a layer of a KV cache its former class, with its present keys and values in fp32."""
    inner = layer.__dict__.pop(_INNER)
    layer.__dict__.clear()
    layer.__class__ = type(inner)
    layer.__dict__.update(vars(inner))
    if layer.keys is not None:
        layer.keys, layer.values, layer.dtype = layer.keys.float(), layer.values.float(), torch.float32


def _is_settings(value: Any) -> bool:
    """True for an object with the attribute `return_dict_in_generate`, such as a GenerationConfig of transformers."""
    return hasattr(value, "return_dict_in_generate") and hasattr(value, "__dict__")


class LowCaches:
    """The KV caches that one call of `generate()` stores in the low format."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._layers: list[weakref.ref[Any]] = []

    def take(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        """Make the empty layers of KV caches among the arguments of a step of `generate()` store keys and values in the low format.

        Caches that the caller made, offloaded caches, and layers of classes that are not in `_LAYERS` stay fp32.
        """
        library = sys.modules.get("transformers.cache_utils")
        known = {getattr(library, name, None) for name in _LAYERS}
        for value in (*args, *kwargs.values()):
            owned = getattr(value, "_is_user_defined", False) or getattr(value, "offloading", False)
            for layer in () if owned else layers_of(value):
                if type(layer) in known and not layer.is_initialized:
                    hold_low(layer, self.dtype)
                    self._layers.append(weakref.ref(layer))

    def end(self) -> None:
        """Switch the layers of these caches back to fp32. Layers that were deleted meanwhile are skipped."""
        for found in self._layers:
            layer = found()
            if layer is not None and is_low(layer):
                hold_fp32(layer)
        self._layers.clear()


class CachesOfModel:
    """Decides whether a rewritten model stores the KV caches of its `generate()` in the low format.

    If the user gave a plan (`given`), the caches are low if a node of the plan casts keys or values to or from a low cache. If the user
    gave no plan, they are low until a graph reads keys or values in fp32 (`check`). `of_call` names further conditions.
    """

    def __init__(self, root: nn.Module, given: ModelPlan | None, note: Callable[[str], None]) -> None:
        self.root, self.given, self.note = root, given, note
        self.low = given is None or any(_is_conversion(node) for region in given.regions for node in region.nodes)

    def of_call(self, low: Format, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LowCaches | None:
        """Return a LowCaches that stores the KV caches of one call of `generate()` in the format `low`; None if the caches stay fp32.

        The caches stay fp32 if the plan reads them in fp32, or if code outside of the model may read them. They also stay fp32 if `low` is
        fp32 or fp16: fp16 would turn large values into infinities. `args` and `kwargs` are the arguments of the call.
        """
        fits = self.low and low is not FP32 and not low.narrow
        return LowCaches(low.dtype) if fits and not self._seen_outside(args, kwargs) else None

    def _seen_outside(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if code outside of the model may see the cache: `return_dict_in_generate` is set, or the model has hooks on its forward, or
        the process has global module hooks."""
        own = getattr(self.root, "generation_config", None)
        asked = [kwargs, *(vars(each) for each in (*args, *kwargs.values(), own) if _is_settings(each))]
        hooks = self.root._forward_hooks or self.root._forward_pre_hooks or any_global_hook()
        return bool(hooks) or any(each.get("return_dict_in_generate") for each in asked)

    def check(self, caches: LowCaches | None, plan: RegionPlan, anew: bool) -> None:
        """If a newly planned graph (`plan`) reads the low `caches` of the running call in fp32, keep the caches of later calls in fp32.

        A graph without planned ops stays fp32, and counts as if it read them in fp32. If `anew` is True, the running call has run no
        code yet: raise CacheReadHigh, and the call begins again with fp32 caches. Do nothing if `caches` is None or the user gave a plan.
        """
        if caches is None or self.given is not None or not (reads_high(plan) or not plan.nodes):
            return
        self.low = False
        self.note("generate() keeps its cache in fp32, as the plan reads it")
        if anew:
            raise CacheReadHigh


def reads_high(plan: RegionPlan) -> bool:
    """True if a planned graph, or a subgraph of it, casts keys or values of a low KV cache to fp32, and so reads them in fp32."""
    return any(node.colour is Colour.HIGH and _is_conversion(node) for region in (plan, *plan.bodies) for node in region.nodes)


def _is_conversion(node: NodePlan) -> bool:
    """True if a node casts keys or values to or from a low KV cache. It is recognised by its source line, which is in this file."""
    return node.source.startswith(f"{_SOURCE}:")


def mark_growing(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """In the arguments of a step of `generate()`, mark the dims whose sizes will change, so that Dynamo captures them as dynamic.

    A dim of size 1 is not marked: PyTorch broadcasts it, so it needs another graph than larger sizes.
    """
    for value in (*args, *kwargs.values()):
        for tensor, dims in _growing(value):
            torch._dynamo.maybe_mark_dynamic(tensor, [dim for dim in dims if tensor.shape[dim] > 1])
        _mark_shared(value)


def shared_sizes(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims of `tensor` for which Dynamo may use one symbolic size if their sizes are equal. `_mark_shared` stores them."""
    found: tuple[int, ...] = getattr(tensor, _SHARED, ())
    return found


def _mark_shared(value: Any) -> None:
    """If `value` is a KV cache, store on its keys and values the dims for which Dynamo may use one symbolic size if they are equal.

    These are the batch and length dims. But a batch of five and a length of five are equal only by chance, and differ after the next step.
    A dim is left out if its size equals that of a dim with another meaning. `shared_sizes` reads the stored dims.
    """
    batch, length = _IN_CACHE
    held = {tensor: {batch: "", length: kind} for layer, kind in _kinds(value) for tensor in _in_layer(layer)}
    meanings: defaultdict[int, set[Any]] = defaultdict(set)
    for tensor, meant in held.items():
        for dim, meaning in meant.items():
            meanings[tensor.shape[dim]].add(meaning)
    for tensor, meant in held.items():
        setattr(tensor, _SHARED, tuple(dim for dim in meant if len(meanings[tensor.shape[dim]]) == 1))


def _kinds(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (layer, kind) for each layer of a cache. Layers of one kind always hold equally many keys.

    The kind is (index of the inner cache, class of the layer, sliding window or None)."""
    for place, cache in enumerate(caches_of(value)):
        yield from ((layer, (place, type(layer), getattr(layer, "sliding_window", None))) for layer in cache.layers)


def _growing(value: Any) -> Iterator[tuple[Tensor, Iterable[int]]]:
    """Yield (tensor, dims whose sizes vary in later calls) for tensors in `value`, which is a tensor, a mapping of tensors, or a cache.

    A floating tensor outside of a KV cache is yielded only if it has three dims, as hidden states have.
    """
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            yield value, range(value.dim())  # all dims may vary: token ids, positions and masks have only batch and length dims
        elif value.dim() == 3:
            yield value, _IN_STATES
    elif isinstance(value, Mapping):
        for inner in value.values():  # for example, an encoder returns its outputs as a mapping
            yield from _growing(inner)
    else:
        for layer in layers_of(value):
            yield from ((held, _IN_CACHE) for held in _in_layer(layer))


def _in_layer(layer: Any) -> list[Tensor]:
    """Return the keys and values that a layer of a KV cache stores, without tensors that do not have the usual four dims."""
    return [held for held in tensors_of(layer) if isinstance(held, Tensor) and held.dim() == 4]
