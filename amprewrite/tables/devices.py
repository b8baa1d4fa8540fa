"""Performance of devices: FLOP/s of each format, bytes/s of memory, seconds to launch a kernel.

Rates and bandwidths of NVIDIA's rows are from the data sheets (dense, no sparsity; SXM boards where there are several): V100 (2020), T4
(2019), A100 80 GB (2021), L4 (2023), H100 (2023), H200 (2024) and HGX B200 (2024, an eighth of the board). Formats that the matrix units
lack run on the fp32 units. "fp8" is the rate of products that read e4m3 or e5m2 and return bf16; devices without fp8 have no such entry. A
launch is the cost of an op in eager PyTorch, 4 to 5 µs. The CPU rows are round figures for eight server cores on two channels of memory.
With the option `measure=True`, ops are timed on the device at hand instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import FORMATS, Format


@dataclass(frozen=True)
class Device:
    """A row of the device table: one model or class of devices, and its speed."""

    name: str
    type: str
    """Device type as in torch: "cpu" or "cuda"; "other" for any other accelerator."""
    flops: Mapping[str, float] = field(hash=False)
    """Dense FLOP/s of a matrix product by format: "fp32", "tf32", "fp16", "bf16", "fp8". Absent formats have the rate of fp32."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    launch: float
    """Seconds to launch one kernel in eager PyTorch."""
    low_formats: tuple[str, ...]
    """Low formats that the matrix units multiply natively, the best first; () if low precision gains nothing."""

    @property
    def flash_attention(self) -> bool:
        """True if PyTorch's flash attention runs on this device. It needs sm_80, as bf16 does (ATen, transformers/cuda/sdp_utils.cpp)."""
        return self.type != "cpu" and "bf16" in self.low_formats

    @property
    def fp8(self) -> bool:
        """True if the matrix units multiply fp8, which NVIDIA's do from sm_89 on."""
        return "fp8" in self.flops

    def rate(self, fmt: str) -> float:
        """Return the FLOP/s of a matrix product in the format `fmt`. If the row has no rate for `fmt`, return the rate of fp32."""
        return self.flops.get(fmt, self.flops["fp32"])


GPUS: list[Device] = []
"""The rows of NVIDIA's GPU models, such as A100, oldest first. `_gpu` appends them."""


def _gpu(name: str, fp32: float, tf32: float, low: float, bandwidth: float, *low_formats: str, fp8: float = 0) -> Device:
    """Make a row of a CUDA GPU from rates in TFLOP/s and a bandwidth in GB/s, add it to GPUS, and return it.

    `low` is the rate of each format in `low_formats`, such as "bf16". `fp8` is the rate of fp8, 0 if the GPU has no fp8 units.
    """
    rates = {"fp32": fp32 * 1e12, "tf32": tf32 * 1e12, **dict.fromkeys(low_formats, low * 1e12)}
    rates |= {"fp8": fp8 * 1e12} if fp8 else {}
    GPUS.append(Device(name, "cuda", rates, bandwidth * 1e9, 4e-6, low_formats))
    return GPUS[-1]


CPU = Device("cpu", "cpu", {"fp32": 5e11, "bf16": 2.5e11, "fp16": 1.25e11}, 4e10, 5e-6, ())
CPU_BF16 = Device("cpu with native bf16", "cpu", {"fp32": 5e11, "bf16": 1e12, "fp16": 2.5e11}, 4e10, 4e-6, ("bf16",))
V100 = _gpu("v100", 15.7, 15.7, 125, 900, "fp16")
T4 = _gpu("t4", 8.1, 8.1, 65, 320, "fp16")
A100 = _gpu("a100", 19.5, 156, 312, 2039, "bf16", "fp16")
L4 = _gpu("l4", 30.3, 60, 121, 300, "bf16", "fp16", fp8=242.5)
H100 = _gpu("h100", 67, 494, 989, 3350, "bf16", "fp16", fp8=1979)
H200 = _gpu("h200", 67, 494, 989, 4800, "bf16", "fp16", fp8=1979)
B200 = _gpu("b200", 75, 1100, 2250, 8000, "bf16", "fp16", fp8=4500)
CUDA_OLD = Device("cuda before sm_70", "cuda", {"fp32": 1e13}, 3e11, 5e-6, ())
CUDA_NO_TENSOR_CORES = Device("cuda sm_75 without Tensor Cores (GTX 16xx)", "cuda", {"fp32": 5e12, "fp16": 1e13}, 2.5e11, 5e-6, ())
OTHER = Device("other accelerator", "other", {"fp32": 2e13, "fp16": 1e14, "bf16": 1e14}, 5e11, 4e-6, ("bf16", "fp16"))

DEVICES = (CPU, CPU_BF16, *GPUS, CUDA_OLD, CUDA_NO_TENSOR_CORES, OTHER)

NAMED: dict[str, Device] = {"cpu": CPU, "cpu-bf16": CPU_BF16, **{row.name: row for row in GPUS}}
"""The devices that the option `device=` accepts, by name."""


def named_device(name: str) -> Device:
    """Return the row called `name`, in upper or lower case. Raises PolicyError, which lists the known names, for anything else."""
    row = NAMED.get(name.lower()) if isinstance(name, str) else None
    if row is None:
        near = difflib.get_close_matches(name.lower(), NAMED, 1) if isinstance(name, str) else []
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PolicyError(f"device={shown(name)} is no device that amprewrite can plan for; it knows {', '.join(NAMED)}.{hint}")
    return row


def device_row(device: str | torch.device) -> Device:
    """Return the row for `device` on this machine. A GPU is found by its name, otherwise by the nearest compute capability.

    AMD GPUs have the row of the A100. Devices other than CPUs and available CUDA GPUs have the row "other accelerator".
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return CPU_BF16 if _cpu_has_bf16() else CPU
    if kind != "cuda" or not torch.cuda.is_available():
        return OTHER
    if torch.version.hip:
        return A100
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    words = name.lower().replace("-", " ").split()
    for row in (V100, T4, A100, L4, H100, H200, B200):
        if row.name in words:
            return row
    if capability < (7, 0):
        return CUDA_OLD
    if capability == (7, 5) and "GTX 16" in name:
        return CUDA_NO_TENSOR_CORES
    if capability < (8, 0):
        return V100 if capability < (7, 5) else T4
    if capability < (9, 0):
        return A100 if capability < (8, 9) else L4  # like the A100, sm_86 and sm_87 have no fp8 units
    return H100 if capability < (10, 0) else B200


def best_format(device: str | torch.device | Device) -> Format | None:
    """Return the best low format (bf16 or fp16) for `device`: the first in its table row. None if low precision gains nothing there."""
    formats = (device if isinstance(device, Device) else device_row(device)).low_formats
    return FORMATS[formats[0]] if formats else None


def fp32_rate(row: Device, convolution: bool) -> str:
    """Return the format in which the device `row` multiplies fp32 matrices under torch's present settings: "tf32" or "fp32".

    `convolution` selects cuDNN's setting for convolutions instead of the setting for matrix products.
    """
    if row.type != "cuda":
        return "fp32"
    cudnn: Any = torch.backends.cudnn  # Any: torch creates the properties at run time, so type checkers do not see them
    backend = cudnn.conv if convolution else torch.backends.cuda.matmul
    asked = backend.fp32_precision
    everywhere = torch.backends.fp32_precision  # type: ignore[attr-defined]
    return "tf32" if (everywhere if asked == "none" else asked) == "tf32" else "fp32"


def _cpu_has_bf16() -> bool:
    """True if the CPU has AVX512-BF16, and so multiplies bf16 natively. x86 CPUs with AMX have it, too."""
    has = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(has and has())
