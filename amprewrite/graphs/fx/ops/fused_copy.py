"""Copy many tensors at once; cast gradients of low copies to fp32, unscale and check them in one pass.

On CUDA a Triton kernel does it where it is faster. Elsewhere, or if Triton is missing or cannot compile, torch does the same in more
passes. Torch's own multi-tensor kernels come first where they apply: they need no table of addresses.

Saved: a gradient of n elements that torch casts and unscales in one pass (2 bytes read, 4 written) and checks in another at the end of
backward (4 read, 4 written) moves 14 n bytes, in one pass 6 n. Cost on the host, without the launch: 14 us for one gradient and 55 us for
sixteen, about as much as sixteen calls of torch's.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from amprewrite.graphs.fx.ops.cuda_graphs import recording
from amprewrite.graphs.fx.ops.finite_flags import record_finite_flag
from amprewrite.graphs.fx.uncaptured import GradMode
from amprewrite.tables.errors import AmpRewriteWarning
from amprewrite.tables.formats import LOW_DTYPES
from amprewrite.torch_internals.dispatch import is_legacy_batched, is_wrapped_by_transform
from amprewrite.torch_internals.kernels import copy_tensors

ONE_PASS_FROM = 1 << 22
"""Elements of a gradient, or of a batch of them, from which on the kernel is used. It saves 8 bytes of each.

By bandwidth that is 10 us here on an H100 (3.35 TB/s), 22 us on an A100 (1.55 TB/s), 110 us on a T4 (0.3 TB/s). Estimated, not timed on a
GPU.
"""
STRIDED_FROM = 6
"""Number of strided copies from which on one launch of the kernel should be cheaper than a launch of torch's for each.

Estimated with 4 us of host time for each of torch's launches, not timed on a GPU.
"""
DEVICES = {"cuda"}
"""Device types on which the kernel runs. A type is removed when the kernel fails there."""
_TABLES = 1024
"""Address tables cached on devices, 2 kB each for 16 tensors. Allocators return the same addresses step after step."""


def copy_many(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy and cast every source into its target of the same shape. Either may be strided. Records no gradient."""
    with GradMode(on=False):
        if len(targets) >= STRIDED_FROM and targets[0].device.type in DEVICES:
            strided = [at for at, target in enumerate(targets) if not target.is_contiguous() or not sources[at].is_contiguous()]
            if len(strided) >= STRIDED_FROM and _by_kernel([sources[at] for at in strided], [targets[at] for at in strided]):
                left = sorted(set(range(len(targets))).difference(strided))
                sources, targets = [sources[at] for at in left], [targets[at] for at in left]
        if targets:
            copy_tensors(list(targets), list(sources))


def unscale_many(gradients: Sequence[Tensor], factor: Tensor, flag: Tensor | None = None) -> list[Tensor] | None:
    """fp32 `gradient * factor` of low gradients in one pass, recorded as checked; None if the kernel cannot do it or does not pay.

    `factor` and `flag` are 0-dim fp32 tensors on the gradients' device. `flag` becomes 1 if a product is not finite.
    """
    if torch.compiler.is_compiling() or not gradients or gradients[0].dtype not in LOW_DTYPES or _kernels(gradients[0].device) is None:
        return None
    if not all(map(is_plain, gradients)) or sum(gradient.numel() for gradient in gradients) < ONE_PASS_FROM:
        return None
    made = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
    flag = torch.zeros((), dtype=torch.float32, device=factor.device) if flag is None else flag
    if not _by_kernel(gradients, made, factor, flag):
        return None
    record_finite_flag(made, flag)
    return made


def is_plain(tensor: Tensor) -> bool:
    """True if a tensor is ordinary strided memory: no subclass, no wrapper of a transform, not being traced."""
    if type(tensor) not in (Tensor, Parameter) or tensor.layout is not torch.strided:
        return False
    wrapped = is_wrapped_by_transform(tensor) or is_legacy_batched(tensor)
    return not (wrapped or torch._is_functional_tensor(tensor))


def _by_kernel(sources: Sequence[Tensor], targets: Sequence[Tensor], factor: Tensor | None = None, flag: Tensor | None = None) -> bool:
    """Copy with the Triton kernel; False if it cannot be used. Some targets may be written even then."""
    where, kinds = targets[0].device, (sources[0].dtype, targets[0].dtype)
    kernels = _kernels(where)
    if kernels is None or not kernels.DTYPES.issuperset(kinds) or recording(where):
        return False  # a replay would read the table of addresses from memory that we may have freed
    by_rank: dict[int, list[tuple[int, ...]]] = {}
    for source, target in zip(sources, targets, strict=True):
        plain = is_plain(source) and is_plain(target) and source.device == where == target.device
        found = kernels.row(source, target) if plain and (source.dtype, target.dtype) == kinds else None
        if found is None:
            return False
        if source.numel():
            by_rank.setdefault(found[0], []).append(found[1])
    try:
        for rank, rows in by_rank.items():
            aligned = rank == 1 and not any(number % 16 for row in rows for number in row[:3])
            longest = max(row[2] for row in rows)
            with torch.cuda.device(where) if where.type == "cuda" else torch.no_grad():
                kernels.launch(_table(tuple(rows), where, _stream(where)), len(rows), longest, kinds, rank, aligned, factor, flag)
    except Exception as error:  # Triton compiles at the first launch: no C compiler, an unsupported device, an error of its own
        DEVICES.discard(where.type)
        _warn(f"the fused kernel for weights and gradients cannot run here ({type(error).__name__}: {error})")
        return False
    return True


def _kernels(device: torch.device) -> ModuleType | None:
    """The module of Triton kernels if they can run on `device`; otherwise None."""
    return _imported() if device.type in DEVICES else None


@functools.cache
def _imported() -> ModuleType | None:
    try:
        from amprewrite.graphs.fx.ops import triton_kernels
    except ImportError as error:
        _warn(f"Triton cannot be imported ({error})")
        return None
    return triton_kernels


def _warn(what: str) -> None:
    warnings.warn(
        f"{what}; torch does the same in more passes over the gradients: right, and a little slower", AmpRewriteWarning, stacklevel=2
    )


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.lru_cache(_TABLES)
def _table(rows: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> Tensor:
    """`rows` as a tensor on `device`, copied without a host sync.

    It is cached by `stream`: another stream might read it before the copy ends.
    """
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
