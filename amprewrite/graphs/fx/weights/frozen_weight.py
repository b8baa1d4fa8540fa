"""A weight of a frozen model, stored in the low format in which the model's graphs read it, without its fp32 values.

1. The weight reports the dtype fp32, as before freezing, because models ask weights for their dtype, and capture reads weights in fp32.
2. A rewritten graph takes the stored tensor directly (`passes/lower/read_frozen_weights.py`). Nothing is cast, and no copy can be stale.
3. Any other reader gets the low values cast to fp32, with a warning. If the model reads the weight in fp32 too, the fp32 values are stored
   in addition, and such readers get the fp32 values without a warning.
4. Writing to the weight raises an error, because rounding would change the written values. Requiring its gradient raises an error, too.
   Copying values in the dtype in which a state dict saves this weight is allowed, as `load_state_dict` does: nothing is rounded.

Dynamo supports this kind of tensor subclass. Under Dynamo's fake mode one plain fp32 fake tensor stands for the weight in every op, so
that the captured graph is the same as for an fp32 weight.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, TypeVar

import torch
import torch.fx
from torch import Tensor

from amprewrite.graphs.fx.ops.pad_ops import slice_dims
from amprewrite.ir.plans.pad_plan import Layout
from amprewrite.tables.errors import AmpRewriteWarning, PolicyError
from amprewrite.tables.formats import dtype_name
from amprewrite.torch_internals.dispatch import FakeTensor, tracing_context
from amprewrite.torch_internals.trees import tree_map_only

T = TypeVar("T", bound=Tensor)
aten = torch.ops.aten
_SAME = {aten.detach.default, aten.alias.default}
"""Ops that return an alias of the same memory."""
_SHAPE_ONLY = {
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.rand_like.default,
    aten.randn_like.default, aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty_strided.default, aten.is_same_size.default,
}  # fmt: skip
"""Ops that read only the shape of a tensor, not its values, so that they need no warning."""
_MAKES_FAKES = "torch._subclasses.meta_utils"
"""Name of the torch module that makes fake tensors. For a call from it, `untyped_storage` returns a storage of fp32's size."""
REMEDY = "call amp.unfreeze(state_dict) with the fp32 values first"
_OWN = {"stored", "padded", "high", "trains", "detached", "_stand_in", "_is_param"}
"""Names of the attributes that this class itself sets. Other code set any other attribute, and copies of the weight keep it."""


class FrozenWeight(Tensor):
    """A weight that looks like an fp32 tensor to its users, but stores a low copy, and fp32 values only if a graph reads them."""

    stored: Tensor
    """The low copy, padded as in `padded`. Its `requires_grad` is the same as that of the weight before freezing."""
    padded: Layout
    high: Tensor | None
    """The fp32 values, if a graph reads the weight in fp32; otherwise None."""
    trains: bool
    """True if the weight required gradients before freezing."""
    detached: Tensor
    """`stored.detach()`, made once."""
    _stand_in: Tensor | None

    @staticmethod
    def __new__(
        cls, stored: Tensor, size: Any, stride: Any, layout: Layout = (), high: Tensor | None = None, trains: bool = False
    ) -> FrozenWeight:
        with torch.inference_mode(False):
            made: FrozenWeight = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, size, strides=stride, dtype=torch.float32, device=stored.device, requires_grad=False
            )
        return made

    def __init__(
        self, stored: Tensor, size: Any, stride: Any, layout: Layout = (), high: Tensor | None = None, trains: bool = False
    ) -> None:
        self.stored, self.padded, self.high, self.trains, self._stand_in = stored, layout, high, trains, None
        self.detached = stored.detach()
        self._is_param = True  # so that isinstance(weight, nn.Parameter) is true

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # -- the stored tensors ----------------------------------------------------------------
    def low(self) -> Tensor:
        """Return the stored low values without padding: a view if possible."""
        return slice_dims(self.detached, self.padded) if self.padded else self.detached

    def thawed(self) -> Tensor:
        """Return a new fp32 tensor with the fp32 values if they are stored, otherwise with the low values."""
        with torch.no_grad():
            made = torch.empty_strided(self.size(), self.stride(), dtype=torch.float32, device=self.device)
            return made.copy_(self.low() if self.high is None else self.high)

    @property
    def low_dtype(self) -> torch.dtype:
        """The dtype of the weight in a state dict: fp32 if the fp32 values are stored, otherwise the dtype of the low copy."""
        return torch.float32 if self.exact else self.stored.dtype

    @property
    def exact(self) -> bool:
        """True if the fp32 values are stored in addition to the low copy."""
        return self.high is not None

    def holds(self, dtype: torch.dtype, layout: Layout) -> bool:
        """True if the stored low copy has this dtype and this padding."""
        return self.stored.dtype == dtype and self.padded == layout

    def of(self, stored: Tensor, high: Tensor | None) -> FrozenWeight:
        """Return a frozen weight like this one, but with the low copy `stored` and the fp32 values `high` (None: not stored)."""
        made = FrozenWeight(stored.requires_grad_(self.trains), self.size(), self.stride(), self.padded, high, self.trains)
        return with_attributes(made, self)

    def held(self) -> tuple[Tensor, ...]:
        """Return the tensors in which this weight is stored: the low copy and, if stored, the fp32 values."""
        return (self.stored,) if self.high is None else (self.stored, self.high)

    # -- the Python interface of a tensor ---------------------------------------------------
    def untyped_storage(self) -> torch.UntypedStorage:
        fakes = sys._getframe(1).f_globals.get("__name__") == _MAKES_FAKES
        if fakes or tracing_context() is not None:
            return super().untyped_storage()  # capture makes a fake fp32 tensor of the weight, and needs a storage of fp32's size
        return self.stored.untyped_storage()

    def element_size(self) -> int:
        return sum(each.element_size() for each in self.held())

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return sum(each.nbytes for each in self.held())

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return False

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> FrozenWeight:
        if requires_grad:
            raise PolicyError(f"a frozen weight takes no gradients: it is stored in {dtype_name(self.stored.dtype)}; to train, {REMEDY}")
        return self

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise PolicyError(f"the data of a frozen weight, which is stored in {dtype_name(self.stored.dtype)}, cannot be replaced; {REMEDY}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        beside = "" if self.high is None else ", fp32 beside"
        return f"FrozenWeight(stored in {dtype_name(self.stored.dtype)}{beside}: {self.low()!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenWeight:
        if id(self) not in memo:
            memo[id(self)] = self.of(self.stored.detach().clone(), None if self.high is None else self.high.clone())
        found: FrozenWeight = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        size, stride = tuple(self.size()), tuple(self.stride())
        return _rebuilt, (self.stored.detach(), size, stride, self.padded, self.high, self.trains, _attributes(self))

    # -- torch's interface for tensor subclasses ----------------------------------------------
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["stored"], (self.padded, self.trains)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> FrozenWeight:
        return FrozenWeight(inner["stored"], size, stride, meta[0], None, meta[1])

    @property
    def stand_in(self) -> Tensor | None:
        """The plain fp32 fake tensor that stands for this weight while a graph is captured; None if the stored tensor is real."""
        stored = self.stored
        if not isinstance(stored, FakeTensor):
            return None
        if self._stand_in is None:
            with stored.fake_mode, torch.inference_mode(False):
                self._stand_in = torch.empty_strided(self.size(), self.stride(), dtype=torch.float32, device=stored.device)
        return self._stand_in

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], cls) else None
        if first is not None and func in _SAME:
            return first._another()
        if first is not None and func is aten._to_copy.default and first.stand_in is None:
            found = first._converted(kwargs)
            if found is not None:
                return found
        if first is not None and func is aten.copy_.default and _is_as_kept(args[1], first):
            for kept in (first.low(), first.high):
                if kept is not None:
                    kept.copy_(args[1])
            return first
        _refuse_writes(func, args, kwargs)
        if first is not None and first.stand_in is None and _is_view(func):
            return first._viewed(func, args[1:], kwargs)
        silent = func in _SHAPE_ONLY

        def plain(weight: FrozenWeight) -> Tensor:
            return weight.stand_in if weight.stand_in is not None else weight._read(silent)

        return func(*tree_map_only(cls, plain, args), **tree_map_only(cls, plain, kwargs))

    def _viewed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of the view op `func` on this weight: frozen views of the stored tensors. Writing to them is refused, too."""
        low = func(self.low(), *args, **kwargs)
        high = low if self.high is None else func(self.high, *args, **kwargs)
        if isinstance(low, Tensor):
            return _view(low, high, self)
        return type(low)(_view(each, beside, self) for each, beside in zip(low, high, strict=True))

    def _another(self) -> FrozenWeight:
        made = FrozenWeight(self.stored, self.size(), self.stride(), self.padded, self.high, self.trains)
        made._stand_in = self._stand_in
        return made

    def _converted(self, kwargs: dict[str, Any]) -> Tensor | None:
        """Return the result of a `to` with the arguments `kwargs` if this method can make it without rounding; otherwise None.

        For the stored dtype the result is a copy of the low values. For another device without a change of dtype it is a frozen weight.
        """
        dtype, device = kwargs.get("dtype"), kwargs.get("device") or self.device
        if dtype == self.stored.dtype:
            return self.low().to(device, copy=True)
        if dtype in (None, torch.float32) and torch.device(device) != self.device:
            moves = {"device": device, "non_blocking": kwargs.get("non_blocking", False)}
            return self.of(self.stored.detach().to(**moves), None if self.high is None else self.high.to(**moves))
        return None

    def _read(self, silent: bool) -> Tensor:
        if not (self.exact or silent):
            warnings.warn(
                f"a frozen weight is read outside of the rewritten graphs: the {dtype_name(self.stored.dtype)} values that are stored, "
                f"cast up; the fp32 values are gone, and {REMEDY} if they matter",
                AmpRewriteWarning, stacklevel=4,
            )  # fmt: skip
        return self.thawed()


def _rebuilt(
    stored: Tensor, size: Any, stride: Any, layout: Layout, high: Tensor | None, trains: bool, attributes: dict[str, Any] | None = None
) -> FrozenWeight:
    made = FrozenWeight(stored.requires_grad_(trains), size, stride, layout, high, trains)
    vars(made).update(attributes or {})  # `attributes` is None in pickles of earlier versions
    return made


def _is_view(func: Any) -> bool:
    """True if `func` returns views of its first argument."""
    given = func._schema.arguments[0].alias_info
    return given is not None and not given.is_write and any(each.alias_info is not None for each in func._schema.returns)


def _view(low: Tensor, high: Tensor, weight: FrozenWeight) -> FrozenWeight:
    made = FrozenWeight(low, low.size(), low.stride(), (), high if weight.exact else None, weight.trains)
    made._is_param = False
    return made


def _is_as_kept(source: Any, weight: FrozenWeight) -> bool:
    """True if `source` can be copied to `weight` without loss: a plain tensor of its shape and state-dict dtype (`low_dtype`)."""
    plain = isinstance(source, Tensor) and not isinstance(source, FrozenWeight)
    return plain and source.dtype == weight.low_dtype and source.shape == weight.shape


def _refuse_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Raise PolicyError if `func` writes to a frozen weight."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[place] if place < len(args) else kwargs.get(argument.name)
        for each in written if isinstance(written, list | tuple) else (written,):
            if isinstance(each, FrozenWeight):
                low, op = dtype_name(each.stored.dtype), func.overloadpacket.__name__
                raise PolicyError(f"{op} writes a frozen weight, which is stored in {low} and would round the new values; {REMEDY}")


def with_attributes(made: T, weight: Tensor) -> T:
    """Return `made`, which replaces `weight` in a model, with the attributes that other code has set on `weight`."""
    vars(made).update(_attributes(weight))
    return made


def _attributes(weight: Tensor) -> dict[str, Any]:
    return {name: each for name, each in vars(weight).items() if name not in _OWN}


def thawed(value: Any) -> Any:
    """Return a plain fp32 tensor for a frozen weight; any other value is returned unchanged."""
    return value.thawed() if isinstance(value, FrozenWeight) else value


def stand_in_for_frozen(graph: torch.fx.Graph) -> None:
    """Replace the example value of each graph input that Dynamo captured as a frozen weight by a plain fp32 fake tensor.

    Passes can read this fake tensor. If gradients are enabled, it requires no gradient, because the weight is a constant. If they are
    disabled, it has the weight's `requires_grad` from before freezing: no gradient follows then, but products choose a kernel by the flag.
    """
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, FrozenWeight) and value.stand_in is not None:
            node.meta["example_value"] = value.stand_in.requires_grad_(value.trains and not torch.is_grad_enabled())
