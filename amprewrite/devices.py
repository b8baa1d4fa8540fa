"""What a device is good at: which formats its matrix units take natively, how fast it moves bytes, what a launch costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from amprewrite.formats import BF16, FP16, Format


@dataclass(frozen=True)
class Device:
    """One row of the device table.

    `bandwidth` in bytes per second and `launch` in seconds price elementwise ops and casts (vendor data sheets, rounded;
    launch cost as eager PyTorch pays it). Only their ratio matters to the planner.
    """

    name: str
    type: str
    bandwidth: float
    launch: float
    low_formats: tuple[str, ...]
    """Formats that the matrix units multiply natively, best first; empty: low precision gains nothing."""


CPU = Device("cpu", "cpu", 4e10, 5e-6, ())
CPU_BF16 = Device("cpu with native bf16", "cpu", 4e10, 4e-6, ("bf16",))
CUDA_OLD = Device("cuda before sm_70", "cuda", 3e11, 5e-6, ())
CUDA_NO_TENSOR_CORES = Device("cuda sm_75 without Tensor Cores (GTX 16xx)", "cuda", 2.5e11, 5e-6, ())
VOLTA = Device("cuda sm_70", "cuda", 9e11, 4e-6, ("fp16",))
TURING = Device("cuda sm_75", "cuda", 3.2e11, 4e-6, ("fp16",))
AMPERE = Device("cuda sm_80 and later", "cuda", 1.5e12, 4e-6, ("bf16", "fp16"))
HOPPER = Device("cuda sm_90 and later", "cuda", 3.3e12, 4e-6, ("bf16", "fp16"))
OTHER = Device("other accelerator", "other", 5e11, 4e-6, ("bf16", "fp16"))

DEVICES = (CPU, CPU_BF16, CUDA_OLD, CUDA_NO_TENSOR_CORES, VOLTA, TURING, AMPERE, HOPPER, OTHER)


def device_row(device: str | torch.device) -> Device:
    """The row that describes `device` on this machine."""
    kind = torch.device(device).type
    if kind == "cpu":
        return CPU_BF16 if _cpu_has_bf16() else CPU
    if kind != "cuda" or not torch.cuda.is_available():
        return OTHER
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip:
        return AMPERE
    if capability < (7, 0):
        return CUDA_OLD
    if capability == (7, 5) and "GTX 16" in torch.cuda.get_device_name(device):
        return CUDA_NO_TENSOR_CORES
    return VOLTA if capability < (7, 5) else TURING if capability < (8, 0) else AMPERE if capability < (9, 0) else HOPPER


def best_format(device: str | torch.device) -> Format | None:
    """The low format that this device multiplies fastest and safest, None where it gains nothing."""
    formats = device_row(device).low_formats
    return {"bf16": BF16, "fp16": FP16}[formats[0]] if formats else None


def _cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 natively (AVX512-BF16 or AMX on x86)."""
    has = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(has and has())
