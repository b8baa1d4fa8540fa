"""fp16 training with the built-in loss scale, against fp32 and against torch.autocast with torch.amp.GradScaler.

    python examples/benchmarks/fp16_training.py [--only digits_cnn,cost] [--seeds 3] [--epochs 6] [--steps 150] [--rounds 40]

Parity: a CNN and a small ViT on scikit-learn's digits, a character GPT on text. Each way trains the same network from the same seed on
the same batches. "gap" is the mean distance of its loss curve from fp32's, in per cent of fp32's mean loss. A difference from fp32 that
is smaller than the spread of fp32's own seeds is none.

Cost: CPU time of one training step of a transformer, all ways in turns in one process; the table gives the ratio of
the best steps, which what else the machine does disturbs least, and medians and quartiles of the ratios within a turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite

sys.path.append(str(Path(__file__).resolve().parent.parent))
import train_char_gpt  # the example's network and text

WAYS = ("fp32", "autocast", "ours")
Batches = Iterator[tuple[Tensor, Tensor]]


class Step:
    """One way to take a training step; `autocast` goes with a GradScaler."""

    def __init__(self, way: str, model: nn.Module, lr: float) -> None:
        self.way = way
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.model = amprewrite.rewrite(model, dtype="fp16", optimizer=self.optimizer) if way == "ours" else model
        self.scaler = torch.amp.GradScaler("cpu", enabled=way == "autocast")

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=self.way == "autocast"):
            out: Tensor = self.model(x)
        return out.float()

    def __call__(self, x: Tensor, y: Tensor, loss_of: Callable[[Tensor, Tensor], Tensor], clip: bool = False) -> Tensor:
        self.optimizer.zero_grad()
        loss = loss_of(self.forward(x), y)
        if self.way != "autocast":
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            return loss.detach()
        self.scaler.scale(loss).backward()
        if clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


# -- parity ----------------------------------------------------------------------------------------------------------------
class ViT(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.places = nn.Parameter(torch.randn(1, 16, width) * 0.3)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.encoder(x).mean(1)))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


@dataclass
class Result:
    score: float
    curve: list[float]
    skipped: int = 0


def digits(make: Callable[[], nn.Module], lr: float, way: str, seed: int, epochs: int) -> Result:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images.reshape(-1, 1, 8, 8) / 8 - 1, dtype=torch.float32)
    split = train_test_split(images, torch.tensor(labels), test_size=0.3, random_state=0, stratify=labels)
    x, x_test, y, y_test = split
    torch.manual_seed(seed)
    step = Step(way, make(), lr)
    order = torch.Generator().manual_seed(seed)
    curve = []
    for _ in range(epochs):
        step.model.train()
        for chosen in torch.randperm(len(x), generator=order)[: len(x) // 64 * 64].split(64):
            curve.append(step(x[chosen], y[chosen], F.cross_entropy).item())
    step.model.eval()
    with torch.no_grad():
        share = (step.forward(x_test).argmax(1) == y_test).float().mean().item()
    return Result(100 * share, curve, skipped(step))


def char_gpt(way: str, seed: int, steps: int) -> Result:
    data, vocabulary = train_char_gpt.corpus()
    cut = int(0.9 * len(data))
    torch.manual_seed(seed)
    step, rng = Step(way, train_char_gpt.GPT(vocabulary), 3e-3), torch.Generator().manual_seed(seed)

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    curve = [step(*train_char_gpt.batch(data[:cut], rng), loss_of, clip=True).item() for _ in range(steps)]
    rng.manual_seed(99)
    step.model.eval()
    with torch.no_grad():
        tests = [train_char_gpt.batch(data[cut:], rng) for _ in range(10)]
        score = statistics.mean(loss_of(step.forward(x), y).item() for x, y in tests)
    return Result(score, curve, skipped(step))


def skipped(step: Step) -> int:
    return step.model.loss_scale.report().skipped if step.way == "ours" else 0


def parity(title: str, run: Callable[[str, int], Result], seeds: int, digits_after: int) -> Table:
    table = Table("way", "mean", "spread of the seeds", "difference from fp32", "gap of the loss curve %", "skipped", title=title)
    results: dict[str, list[Result]] = {way: [run(way, seed) for seed in range(seeds)] for way in WAYS}
    base = statistics.mean(result.score for result in results["fp32"])
    for way, found in results.items():
        scores = [result.score for result in found]
        gaps = [
            100 * sum(abs(a - b) for a, b in zip(result.curve, plain.curve, strict=True)) / sum(plain.curve)
            for result, plain in zip(found, results["fp32"], strict=True)
        ]
        table.add_row(
            way,
            f"{statistics.mean(scores):.{digits_after}f}",
            f"{max(scores) - min(scores):.{digits_after}f}",
            f"{statistics.mean(scores) - base:+.{digits_after}f}",
            f"{statistics.mean(gaps):.3f}",
            "/".join(str(result.skipped) for result in found) if way == "ours" else "",
        )
    return table


# -- cost ------------------------------------------------------------------------------------------------------------------
COSTS = {
    "small, width 32 x 12 layers": (32, 12, (2, 16)),
    "small, width 64 x 4 layers": (64, 4, (4, 16)),
    "medium, width 256 x 4 layers": (256, 4, (4, 64)),
}


def transformer(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(depth)]
    return nn.Sequential(*layers)


def cost(rounds: int) -> Table:
    table = Table(
        "transformer",
        "fp32 ms",
        "autocast + GradScaler ms",
        "ours ms",
        "ours / autocast, of the best",
        "median of ratios",
        "quartiles",
        title="one training step, fp16, CPU time",
    )
    for name, (width, depth, shape) in COSTS.items():
        x, y = torch.randn(*shape, width), torch.randn(*shape, width)
        steps = {way: Step(way, transformer(width, depth), 1e-4) for way in WAYS}
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(rounds + 3):
            for way in WAYS if turn % 2 else reversed(WAYS):
                started = time.process_time()
                steps[way](x, y, F.mse_loss)
                if turn >= 3:
                    seconds[way].append(time.process_time() - started)
        ratios = [a / b for a, b in zip(seconds["ours"], seconds["autocast"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        table.add_row(
            name,
            *(f"{1e3 * min(seconds[way]):.2f}" for way in WAYS),
            f"{min(seconds['ours']) / min(seconds['autocast']):.3f}",
            f"{middle:.3f}",
            f"{low:.3f}-{high:.3f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="digits_cnn,digits_vit,char_gpt,cost")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*NestedTensor.*")
    console = Console(width=120)
    tables: dict[str, Callable[[], Table]] = {
        "digits_cnn": lambda: parity(
            "CNN on digits, test accuracy %", lambda way, seed: digits(cnn, 4e-3, way, seed, asked.epochs), asked.seeds, 2
        ),
        "digits_vit": lambda: parity(
            "ViT on digits, test accuracy %", lambda way, seed: digits(ViT, 4e-3, way, seed, asked.epochs), asked.seeds, 2
        ),
        "char_gpt": lambda: parity(
            "character GPT, test loss, nats", lambda way, seed: char_gpt(way, seed, asked.steps), asked.seeds, 4
        ),
        "cost": lambda: cost(asked.rounds),
    }
    for name in asked.only.split(","):
        if name not in tables:
            parser.error(f"--only knows {', '.join(tables)}, not {name}")
        console.print(tables[name]())


if __name__ == "__main__":
    main()
