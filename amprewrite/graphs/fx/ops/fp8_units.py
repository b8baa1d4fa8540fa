"""Run the kernels of a GPU with fp8 units, which make and multiply fp8 copies, and a fallback in place of a kernel that fails.

The first launch of a kernel may fail, because Triton compiles the kernel at this launch and cuBLAS searches for an algorithm. The first
failure raises a warning, and the kernel is not tried again. Instead, PyTorch's own ops make the copies, or bf16 units multiply the fp8
copies: bf16 represents every number of both fp8 formats, and sums stay in fp32, so only the order of summation differs.

A compiled graph cannot catch an error. So a product in a compiled graph is a custom op, which catches the error at run time. An exported
program contains `torch._scaled_mm`, because it runs without this package.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from amprewrite.graphs.fx.ops.on_device import recording
from amprewrite.graphs.fx.ops.wide_products import wide_product
from amprewrite.ir.policies.policy import ProductPolicy
from amprewrite.tables.errors import AmpRewriteWarning
from amprewrite.tables.formats import BASE, E4M3, READS, ROWS, Recipe
from amprewrite.torch_internals.dispatch import disable_dispatch_modes, is_plain
from amprewrite.torch_internals.kernels import scaled_mm

T = TypeVar("T")
TRIAL = 64
"""Rows and columns of the matrices of a trial product."""
_failed: set[tuple[object, ...]] = set()
"""Keys of the kernels that failed. The key of a kernel contains its device."""


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """True if the matrix units of `device` multiply fp8: an NVIDIA GPU from compute capability 8.9 on."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def by_kernel(matrix: Tensor, use: Callable[[ModuleType], T]) -> T | None:
    """Return `use(kernels)`, where `kernels` is the module of our Triton kernels; None if these kernels cannot run on `matrix`.

    They cannot run without fp8 units, during compilation, on a matrix that is not plain contiguous memory, or after one has failed.
    """
    if not multiplies_fp8(matrix.device) or torch.compiler.is_compiling() or not is_plain(matrix) or not matrix.is_contiguous():
        return None
    return _launched(matrix, use)


def _launched(matrix: Tensor, use: Callable[[ModuleType], T]) -> T | None:
    if ("casts", matrix.device) in _failed:
        return None
    try:
        with torch.cuda.device(matrix.device) if matrix.is_cuda else torch.no_grad():  # Triton launches kernels on the current device
            return use(_imported())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the import of Triton may fail; its compiler, which runs at the first launch, may raise any error
        _fails(("casts", matrix.device), f"the kernel that makes fp8 copies cannot run here ({_brief(error)}); torch makes them")
        return None


def _imported() -> ModuleType:
    from amprewrite.graphs.fx.ops import triton_fp8

    return triton_fp8


def multiply_units(
    left: Tensor, right: Tensor, ours: Tensor, theirs: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return `(left * ours) · (right * theirs)ᵀ + bias` as `dtype`, computed by fp8 units, or by bf16 units if the fp8 kernel fails.

    `left` (m, k) and `right` (n, k) are fp8. `ours` and `theirs` are fp32 factors. Each is 0-dim, or a column with one factor for each row
    of the fp8 matrix that it multiplies. With `fast`, the kernel may accumulate with fewer bits.
    """
    in_graph = torch.compiler.is_compiling() or not is_plain(left)
    use: Callable[..., Tensor] = _launch if torch.compiler.is_exporting() else _in_graphs if in_graph else _multiply
    return use(left, right, ours, theirs, bias, dtype, fast)


def _multiply(left: Tensor, right: Tensor, ours: Tensor, theirs: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool) -> Tensor:
    # `kind` is the key under which a failure is recorded: the properties by which cuBLAS chooses an algorithm. The number of rows of
    # `left` is not among them, because it changes with the batch size.
    kind = (left.device, left.dtype, right.dtype, ours.dim(), bias is None, fast, left.shape[1], len(right))
    if kind not in _failed:
        try:
            return _launch(left, right, ours, theirs, bias, dtype, fast)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch raises an error if it does not support the device, a size or a layout
            sizes = f"{len(left)} x {left.shape[1]} x {len(right)}"
            _fails(kind, f"an fp8 product of {sizes} cannot run here ({_brief(error)}); bf16 units multiply the same copies")
    product = wide_product(left.to(BASE.dtype), right.to(BASE.dtype).t()) * ours * theirs.t()
    return product.to(dtype) if bias is None else product.to(dtype) + bias


_in_graphs = torch.library.custom_op("amprewrite::multiply_fp8", _multiply, mutates_args=())


@_in_graphs.register_fake
def _shape(left: Tensor, right: Tensor, ours: Tensor, theirs: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[0]), dtype=dtype)


def _launch(left: Tensor, right: Tensor, ours: Tensor, theirs: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool) -> Tensor:
    # `contiguous` is not enough: it keeps any row stride of a one-row matrix. flatten and unflatten set the strides that the kernel needs.
    left, right = (each.contiguous().flatten().unflatten(0, each.shape) for each in (left, right))
    return scaled_mm(left, right.t(), ours, theirs.t(), bias, out_dtype=dtype, use_fast_accum=fast)


def _fails(what: tuple[object, ...], message: str) -> None:
    _failed.add(what)
    advice = "right, but slower than bf16 perhaps: leave products= out if it is"
    warnings.warn(f"{message}: {advice}", AmpRewriteWarning, stacklevel=2)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


@cache
def fails_on(device: torch.device, recipe: Recipe) -> str:
    """Return the error of the first GEMM of `recipe` that fails in a trial on `device`; "" if none fails."""
    for gemm in recipe.gemms:
        try:
            with disable_dispatch_modes(), torch.no_grad():
                fast = gemm in recipe.fast
                by_rows = fast and any(recipe.scaling(role, way) == ROWS for role, way in READS[gemm])
                left, right = (torch.ones(TRIAL, TRIAL, device=device).to(recipe.format(role).dtype) for role, _ in READS[gemm])
                factor = torch.ones((TRIAL, 1) if by_rows else (), device=device, dtype=torch.float32)
                bias = torch.zeros(TRIAL, dtype=BASE.dtype, device=device) if fast else None
                made = _launch(left, right, factor, factor, bias, BASE.dtype, fast)
                if not bool((made == TRIAL).all()):
                    return f"{gemm}: a sum of {TRIAL} ones is {made.flatten()[0].item()}"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch raises an error if it does not support the device, a size or a layout
            return f"{gemm}: {_brief(error)}"
    return ""


@cache
def makes_copies(device: torch.device) -> bool:
    """True if our Triton kernels make correct fp8 copies on `device`."""
    with disable_dispatch_modes(), torch.no_grad():
        ones, one = torch.ones(TRIAL, TRIAL, dtype=BASE.dtype, device=device), torch.ones((), dtype=torch.float32, device=device)

        def copies(kernels: ModuleType) -> tuple[Tensor, ...]:
            scale, (data, scales) = (make(ones, E4M3.dtype, 1.0, True) for make in (kernels.scale_of, kernels.cast_rows))
            return scale / 256, data.float() / scales, *kernels.cast_both(ones, one, E4M3.dtype, True, True)

        made = _launched(ones, copies)  # not `by_kernel`, which runs no kernel while Dynamo compiles a graph: plans are made at that time
        right = made is not None and all(bool((each.float() == 1).all()) for each in made)
    if made is not None and not right:
        _fails(("casts", ones.device), "the kernel that makes fp8 copies gives wrong ones here; torch makes them")
    return right


def runnable(products: ProductPolicy, kind: str, note: Callable[[str], None]) -> ProductPolicy | None:
    """Return the fp8 policy `products`, limited to what a device of `kind` (such as "cuda") can run; None if an fp8 GEMM fails in a trial.

    A second trial runs our Triton kernels that make fp8 copies. If they fail, plans under the returned policy count the price of copies by
    PyTorch's slower ops. There is no second trial if `products.fused`, because a compiler makes the copies. `note` is called with the
    reason for each limit. There is no trial at all, and `products` is returned unchanged, if the device has no fp8 units, or while a CUDA
    graph is recorded, when no result can be read.
    """
    device = torch.device(kind)
    if not multiplies_fp8(device) or recording(device):
        return products
    if why := fails_on(device, products.preset.recipe):
        note(f"products: this GPU should multiply fp8, but a first product failed ({why}), so products run in bf16")
        return None
    if not products.fused and not makes_copies(device):
        note("products: the kernel that makes fp8 copies cannot run here, so copies are priced as torch makes them, in many passes")
        return replace(products, kernel=False)
    return products
