"""Train a small convolutional network on scikit-learn's digits, in fp32 and rewritten to bf16, and compare.

    python examples/digits.py [--epochs N] [--dtype bf16]

The training loop is the same for both: nothing in it knows about precision.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F

import amprewrite


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 10),
    )  # fmt: skip


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    digits = load_digits()
    split = train_test_split(digits.images / 16.0, digits.target, test_size=0.25, random_state=0, stratify=digits.target)
    x, x_test, y, y_test = (torch.tensor(part) for part in split)
    return x[:, None].float(), y, x_test[:, None].float(), y_test


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int) -> float:
    """Train in place; seconds it took."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    started = time.perf_counter()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            if len(batch) < 64:
                continue
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return time.perf_counter() - started


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    model.eval()
    return (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--dtype", default="bf16", choices=["bf16", "fp16"])
    asked = options.parse_args()

    x, y, x_test, y_test = data()
    plain, mixed = network(), amprewrite.rewrite(network(), dtype=asked.dtype)
    print(f"digits: {len(x)} images to train on, {len(x_test)} to test, {asked.epochs} epochs\n")
    results = {}
    for name, model in (("fp32", plain), (asked.dtype, mixed)):
        seconds = train(model, x, y, asked.epochs)
        if model is mixed:
            print(mixed.plan, "\n")
        results[name] = accuracy(model, x_test, y_test), seconds
    for name, (share, seconds) in results.items():
        print(f"{name}: test accuracy {100 * share:.2f} %, trained in {seconds:.1f} s")


if __name__ == "__main__":
    main()
