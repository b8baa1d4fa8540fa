"""A file that follows the PyTorch plan gives, under strict rounding, what that plan gives under strict rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.accuracy.strict.run import StrictRun
from amprewrite.graphs.onnx.run.compare import strict_outputs

pytest.importorskip("onnxruntime")


class Kept(StrictRun):
    """Keeps the outputs of its latest run."""

    latest: list[torch.Tensor]

    def _run(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        outputs, gradients = super()._run()
        self.latest = outputs
        return outputs, gradients


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Without biases: over three dims the exporter writes a linear with one as a product and a sum, which round apart. The factor is a
    number that low formats hold: a file stores its constants in low."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.second(torch.relu(self.first(x))))).mean((2, 3)))


class Denied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(self.down(torch.exp(-self.up(x).square())), -1)


NETS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (4, 16)), "attention": (Attention, (2, 6, 16)), "convolutions": (Convolutions, (2, 3, 12, 12)),
    "denied": (Denied, (4, 16)),
}  # fmt: skip


def strict_results(made: type[nn.Module], x: torch.Tensor, dtype: str, folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The fp32 result, and those of the PyTorch plan and of the file, rounded strictly."""
    torch.manual_seed(0)
    model = made().eval()
    amp: Any = amprewrite.rewrite(model, dtype=dtype)
    with torch.no_grad():
        run = Kept(amp, (x,))
        run.rounded()
        amp(x)
        exact = model(x).numpy()
    file = amp.export_onnx(folder / "m.onnx", (x,), plan=amp.plan).ir_model
    ((got, *_),) = strict_outputs(file, [{str(file.graph.inputs[0].name): x.numpy()}])
    return exact, run.latest[0].numpy(), got


def apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.long
def test_the_file_rounds_where_the_model_does(name, dtype, tmp_path):
    made, shape = NETS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    exact, planned, written = strict_results(made, x, dtype, tmp_path)
    assert apart(planned, exact) > 1e-5, "nothing was rounded"
    assert apart(written, planned) <= 1e-6


class Rotary(nn.Module):
    """Angles as an outer product, which no product sums: torch.autocast leaves them in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 64)
        self.register_buffer("steps", 10000.0 ** (-torch.arange(32) / 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = torch.einsum("i,j->ij", torch.arange(x.shape[1], dtype=torch.float32), self.steps)
        angles = torch.cat([half, half], -1)
        h = self.project(x)
        return h * angles.cos() + torch.cat([-h[..., 32:], h[..., :32]], -1) * angles.sin()


def test_an_outer_product_of_an_einsum_is_exact_in_the_file_too(tmp_path: Path) -> None:
    model, x = Rotary().eval(), torch.randn(1, 3000, 64)
    amp: Any = amprewrite.rewrite(model, dtype="fp16")
    shapes = ({1: torch.export.Dim("length")},)
    file = amp.export_onnx(tmp_path / "m.onnx", (torch.randn(1, 64, 64),), dynamic_shapes=shapes).ir_model
    with torch.no_grad():
        exact, found = model(x).numpy(), amp(x).numpy()
    ((written, *_),) = strict_outputs(file, [{str(file.graph.inputs[0].name): x.numpy()}])
    assert apart(found, exact) < 1e-3
    assert apart(written, exact) < 1e-3
