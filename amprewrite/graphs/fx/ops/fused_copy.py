"""Copy many tensors at once; cast gradients of low copies to fp32, unscale and check them in one pass.

On CUDA a Triton kernel does both jobs where it is faster. On other devices, and if Triton is missing or cannot compile, torch does them in
more passes. Torch's own multi-tensor kernels are preferred where they apply, because they need no table of addresses.

For a gradient of n elements, torch moves 14 n bytes: one pass casts and unscales (2 bytes read, 4 written), and another pass at the end of
backward checks (4 read, 4 written). The kernel moves 6 n bytes in its one pass. Its cost on the host, without the launch, is 14 us for one
gradient and 55 us for sixteen gradients, about as much as sixteen calls of torch functions.
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
"""Least number of elements, over all gradients of a call, for which the kernel is used. The kernel saves 8 bytes for each element.

At this number the saving is 10 us on an H100 (3.35 TB/s), 22 us on an A100 (1.55 TB/s) and 110 us on a T4 (0.3 TB/s). These times are
computed from the bandwidth, not measured.
"""
STRIDED_FROM = 6
"""Least number of strided copies for which one launch of the kernel replaces one torch launch for each copy.

From this number on the kernel should be cheaper: an estimate with 4 us of host time for each torch launch, not a measurement.
"""
DEVICES = {"cuda"}
"""Device types on which the kernel runs. A type is removed when the kernel fails there."""
_TABLES = 1024
"""Largest number of address tables that are cached on devices. A table takes 2 kB for 16 tensors.

Later steps use the tables again, because allocators return the same addresses step after step.
"""


def copy_many(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy and cast each source into the target at the same position, which has the same shape.

    Sources and targets may be strided. Autograd records nothing.
    """
    with GradMode(on=False):
        if len(targets) >= STRIDED_FROM and targets[0].device.type in DEVICES:
            strided = [at for at, target in enumerate(targets) if not target.is_contiguous() or not sources[at].is_contiguous()]
            if len(strided) >= STRIDED_FROM and _by_kernel([sources[at] for at in strided], [targets[at] for at in strided]):
                left = sorted(set(range(len(targets))).difference(strided))
                sources, targets = [sources[at] for at in left], [targets[at] for at in left]
        if targets:
            copy_tensors(list(targets), list(sources))


def unscale_many(gradients: Sequence[Tensor], factor: Tensor, flag: Tensor | None = None) -> list[Tensor] | None:
    """Return fp32 `gradient * factor` for each of the low `gradients`, made in one pass; None if the kernel cannot run or is not faster.

    `factor` and `flag` are 0-dim fp32 tensors on the device of the gradients. `flag` becomes 1 if a product is not finite. The products are
    recorded as checked (`finite_flags.py`).
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
    """True if `tensor` is ordinary strided memory: not a subclass, not a wrapper of a torch.func transform, not traced."""
    if type(tensor) not in (Tensor, Parameter) or tensor.layout is not torch.strided:
        return False
    wrapped = is_wrapped_by_transform(tensor) or is_legacy_batched(tensor)
    return not (wrapped or torch._is_functional_tensor(tensor))


def _by_kernel(sources: Sequence[Tensor], targets: Sequence[Tensor], factor: Tensor | None = None, flag: Tensor | None = None) -> bool:
    """Copy with the Triton kernel; return False if the kernel cannot copy all tensors. Some targets may be written even then."""
    where, kinds = targets[0].device, (sources[0].dtype, targets[0].dtype)
    kernels = _kernels(where)
    if kernels is None or not kernels.DTYPES.issuperset(kinds) or recording(where):
        return False  # not while recording: a replay would read the table of addresses from memory that we may have freed
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
    except Exception as error:  # Triton compiles at the first launch, which fails without a C compiler or on an unsupported device
        DEVICES.discard(where.type)
        _warn(f"the fused kernel for weights and gradients cannot run here ({type(error).__name__}: {error})")
        return False
    return True


def _kernels(device: torch.device) -> ModuleType | None:
    """Return the module of Triton kernels if they can run on `device`; otherwise None."""
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
    """Return `rows` as an int64 tensor on `device`, copied without a host sync.

    Each `stream` has its own cached table, because another stream might read the table before the copy ends.
    """
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
