"""Train a convolutional network on scikit-learn's digits in fp16, with the training loop that fp32 would have.

    python examples/train_digits_fp16.py [--epochs N]
    torchrun --nproc-per-node 2 examples/train_digits_fp16.py     the same over two processes (gloo, on the CPU)

Every fifth batch of the first epoch is given a loss that overflows: those steps are skipped, and training goes on.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import amprewrite


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--epochs", type=int, default=6)
    asked = options.parse_args()

    rank, ranks = 0, 1
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
    train(asked.epochs, rank, ranks)
    if ranks > 1:  # nothing of the training lives now: a DDP that outlives its group may hang
        dist.barrier()
        dist.destroy_process_group()


def train(epochs: int, rank: int, ranks: int) -> None:
    digits = load_digits()
    split = train_test_split(digits.images / 16.0, digits.target, test_size=0.25, random_state=0, stratify=digits.target)
    x, x_test, y, y_test = (torch.tensor(part) for part in split)
    x, x_test = x[:, None].float(), x_test[:, None].float()

    amp = amprewrite.rewrite(network(), dtype="fp16")
    model = DistributedDataParallel(amp) if ranks > 1 else amp
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    order = torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        for index, chosen in enumerate(torch.randperm(len(x), generator=order).split(64)):
            chosen = chosen[rank::ranks]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
            if epoch == 0 and index % 5 == 4:
                loss = loss * 2.0**20
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}  loss {loss.item():.4f}", flush=True)

    model.eval()
    with torch.no_grad():
        share = (amp(x_test).argmax(1) == y_test).float().mean().item()
    if rank == 0:
        print(f"\nfp16: test accuracy {100 * share:.2f} %\n{amp.loss_scale.report()}")


if __name__ == "__main__":
    main()
