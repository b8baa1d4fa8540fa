"""Train a small character GPT in bf16 and with fp8 products, on any machine, and compare the losses.

    python examples/train_fp8_gpt.py [--steps N] [--seeds N]

Where there are no fp8 units the products are emulated: the numbers are those of torchao's emulation of the recipes, bit for bit. At this
size nothing pays, so a rule asks for fp8 at any price; the head stays in bf16.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from train_char_gpt import GPT, batch, corpus, loss_of

import amprewrite

WAYS = (None, "fp8", "fp8-rowwise", "fp8-safe")


def learn(products: str | None, steps: int, seed: int) -> float:
    """The test loss after so many steps."""
    data, vocabulary = corpus()
    train, test = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]
    torch.manual_seed(seed)
    rules = None if products is None else {"preset": products, "module:blocks": "fp8"}
    amp = amprewrite.rewrite(GPT(vocabulary), dtype="bf16", products=rules)
    optimizer = torch.optim.AdamW(amp.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(amp, *batch(train, rng)).backward()
        nn.utils.clip_grad_norm_(amp.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    amp.eval()
    rng.manual_seed(99)
    with torch.no_grad():
        return sum(loss_of(amp, *batch(test, rng)).item() for _ in range(10)) / 10


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--seeds", type=int, default=1)
    asked = options.parse_args()
    for seed in range(asked.seeds):
        losses = {products: learn(products, asked.steps, seed) for products in WAYS}
        for products, loss in losses.items():
            print(f"seed {seed}  {products or 'bf16':12} test loss {loss:.4f} ({100 * (loss / losses[None] - 1):+.3f} %)", flush=True)


if __name__ == "__main__":
    main()
