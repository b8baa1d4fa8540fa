"""Modes that change or watch what PyTorch runs: ops that round, ops that are counted, hooks that hear of infinities."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch._higher_order_ops.map import map_dense
from torch._higher_order_ops.scan import generic_scan
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

HEAVY = frozenset([
    "mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_convolution", "convolution_overrideable",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "cudnn_convolution", "linear", "matmul", "einsum", "bilinear", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention",
])  # fmt: skip
"""Ops that do most of the work. In the bodies of loops and conditions a dispatch mode sees composite ones whole, elsewhere their parts."""
SUMS = ("add", "sub", "rsub", "add_", "sub_")
"""Ops that may add a number."""
SHAPED = frozenset([
    "empty_like", "full_like", "ones_like", "zeros_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
])  # fmt: skip
"""Ops that take the shape and the dtype of a tensor, and none of its numbers."""


class Rounded(TorchDispatchMode):
    """Rounds the result of every op to a low format, and the operands of products, and knows whether that ever changed anything.

    What is made of integers alone is not rounded, as fp32 holds it because it counts something, unless `counts` says so.
    Without `operands` a weight beyond the range is read as it is. With `numbers` what a sum adds is rounded, too, as a CPU's low kernels
    do: there 1000 - 999 is 0 in bf16.
    """

    def __init__(self, low: torch.dtype, operands: bool = True, numbers: bool = False, counts: bool = False) -> None:
        super().__init__()
        self.low, self.operands, self.numbers, self.counts, self.exact = low, operands, numbers, counts, True
        self.counted = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.counts and self._counts(func, args, kwargs):
            result = func(*args, **(kwargs or {}))
            self.counted.update((each, True) for each in tree_flatten(result)[0] if isinstance(each, torch.Tensor))
            return result
        return self._rounding(func, args, kwargs)

    def _counts(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an op reads no number that is made of anything but integers; a write of such a number may reach any view."""
        if func.overloadpacket.__name__ in SHAPED:
            return True
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor) and each.dtype.is_floating_point]
        if all(each in self.counted for each in given):
            return True
        if func._schema.is_mutable:
            self.counted.clear()
        return False

    def _rounding(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.operands and func.overloadpacket.__name__ in HEAVY:
            given = kwargs or {}
            args, kwargs = tree_map(self._rounded_if_fp32, (args, given))
            kwargs |= {"out": given["out"]} if "out" in given else {}  # it is written, not read
        floats = all(each.is_floating_point() for each in args if torch.is_tensor(each))
        if self.numbers and floats and func.overloadpacket.__name__ in SUMS:
            args = tuple(float(torch.tensor(each).to(self.low)) if isinstance(each, int | float) else each for each in args)
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        aliased = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        if aliased:
            return result
        written = any(each.alias_info is not None for each in returns)
        if written:
            for each in tree_flatten(result)[0]:
                if isinstance(each, torch.Tensor) and each.dtype == torch.float32:
                    each.copy_(self._round(each))
            return result
        return tree_map(self._rounded_if_fp32, result)

    def _rounded_if_fp32(self, value: Any) -> Any:
        low = isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value not in self.counted
        return self._round(value) if low else value

    def _round(self, value: torch.Tensor) -> torch.Tensor:
        if value._is_zerotensor() or value.is_meta:  # has no memory; the derivative of sgn gives the one, jvp makes the other
            return value
        rounded = value.to(self.low).to(value.dtype)
        if self.exact and not torch.equal(rounded, value):
            self.exact = False
        return rounded


class Scattered(Rounded):
    """Rounds all that ops read and give, up or down at random, as often as the value is near: another draw of the same errors.

    One value is rounded the same way wherever it stands, so what cancels goes on cancelling. What is beyond the format's range stays as
    it is: so a run tells how far roundings take a result, small numbers that lose bits among them, also where a rounded run overflows.
    With `products` these alone round: what many roundings flush to zero, one at a product may leave.
    """

    def __init__(self, low: torch.dtype, seed: int, numbers: bool = False, products: bool = False, counts: bool = False) -> None:
        super().__init__(low, numbers=numbers, counts=counts)
        self.seed, self.products = seed, products

    def _rounding(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.products and func.overloadpacket.__name__ not in HEAVY:
            return func(*args, **(kwargs or {}))
        if not any(each.alias_info is not None for each in func._schema.returns):
            args, kwargs = tree_map(self._rounded_if_fp32, (args, kwargs or {}))
        return super()._rounding(func, args, kwargs)

    def _round(self, value: torch.Tensor) -> torch.Tensor:
        if value._is_zerotensor() or value.is_meta:
            return value
        near = value.to(self.low)
        beyond = torch.where(near.to(value.dtype) < value, torch.inf, -torch.inf).to(self.low)
        far = torch.nextafter(near, beyond)
        gap = far.to(value.dtype) - near.to(value.dtype)
        share = ((value - near.to(value.dtype)) / gap).nan_to_num(0.0)  # 0 where the format holds the value, 1/2 in the middle
        drawn = torch.where((self._drawn(value) < share) & far.isfinite(), far, near).to(value.dtype)
        return torch.where(near.isfinite(), drawn, value)

    def _drawn(self, value: torch.Tensor) -> torch.Tensor:
        """Numbers from 0 to 1 that the bits of the values and the seed give."""
        bits = value.detach().contiguous().view(torch.int32).to(torch.int64).reshape(value.shape) + 7919 * (self.seed + 1)
        for _ in range(2):
            bits = ((bits ^ (bits >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
        return (bits >> 8).to(torch.float32) / 2**24


class Moved(TorchDispatchMode):
    """Moves one of twelve low results of ops to a neighbour: as another rounding does, which is off by as much, and no more.

    So runs under autocast tell how far roundings alone take a result: of a stale weight or a lost gradient they know nothing.
    """

    def __init__(self, low: torch.dtype, seed: int) -> None:
        super().__init__()
        self.low, self.draws = low, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._can_decompose():  # in inference mode composite ops come whole; their parts are autocast's matter
            with self, torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutocastCPU, False):
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        return result if any(each.alias_info is not None for each in func._schema.returns) else tree_map(self._moved, result)

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != self.low or value._is_zerotensor():
            return value
        drawn = torch.rand(value.shape, generator=self.draws)
        up, down = (torch.nextafter(value, torch.full_like(value, end)) for end in (torch.inf, -torch.inf))
        moved = torch.where(drawn < 1 / 24, up, torch.where(drawn > 23 / 24, down, value))
        return torch.where((value == 0) | ~value.isfinite() | ~moved.isfinite(), value, moved)


class Doubled(TorchDispatchMode):
    """Computes each op in fp64 and rounds its result to fp32: where that differs from fp32, fp32 itself is off.

    A gradient that vanishes in exact arithmetic, as before a batch norm, is in fp32 all that its kernels round.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each.alias_info is not None for each in func._schema.returns):
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(partial(_converted, torch.float32, torch.float64), (args, kwargs or {}))
        return tree_map(partial(_converted, torch.float64, torch.float32), func(*args, **kwargs))


def _converted(given: torch.dtype, to: torch.dtype, value: Any) -> Any:
    """A tensor in `to` for one in `given`; any other value as it is."""
    return value.to(to) if isinstance(value, torch.Tensor) and value.dtype is given else value


class HeavyOps(TorchDispatchMode):
    """Counts matrix products, convolutions and attention by dtype, in the bodies of loops, scans, maps and conditions, too."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self._bodies(func, args, kwargs or {})
        if func.overloadpacket.__name__ in HEAVY:
            self.ran[next(each.dtype for each in args if isinstance(each, torch.Tensor))] += 1
        return func(*args, **(kwargs or {}))

    def _bodies(self, func: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        if func.name() == "while_loop":
            test, body, carried, extra = args
            with self:
                while test(*carried, *extra):
                    carried = body(*carried, *extra)
            return carried
        if func.name() == "cond":
            predicate, yes, no, operands = args
            with self:
                return (yes if predicate else no)(*operands)
        if func.name() == "scan":
            step, carried, over, extra = args
            with self:
                return generic_scan(step, carried, over, additional_inputs=tuple(extra))
        if func.name() == "map_impl":
            with self:
                return map_dense(*args)
        return func(*args, **kwargs)


class Hooked(TorchFunctionMode):
    """Collects the tensors on which the model registers hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook:
            self.tensors.append(args[0])
        return func(*args, **(kwargs or {}))


class ToldHooks(TorchFunctionMode):
    """Gives the model's hooks NaN in place of infinities, as the library does: a hook that clamps would hide an overflow otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook:
            value, hook = args
            args = value, lambda gradient: hook(None if gradient is None else gradient + (gradient - gradient))
        return func(*args, **(kwargs or {}))
