"""Train a small character GPT on English text in fp16, with the training loop that fp32 would have.

    python examples/train_char_gpt.py [--steps N] [--dtype fp16]
    torchrun --nproc-per-node 2 examples/train_char_gpt.py        the same over two processes (gloo on CPU, NCCL on GPUs)
    torchrun --nproc-per-node 2 examples/train_char_gpt.py --shard                  with FSDP2, block by block

The text is that of Python's own help() topics: half a megabyte of prose, nothing to download.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import amprewrite

CONTEXT, BATCH = 64, 16


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def corpus() -> tuple[Tensor, int]:
    """Characters as numbers, and how many different ones there are."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    characters, numbers = data.unique(return_inverse=True)
    return numbers, len(characters)


def batch(data: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(0, len(data) - CONTEXT - 1, (BATCH,), generator=rng)
    rows = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--dtype", default="fp16", choices=["fp16", "bf16", "fp32"])
    options.add_argument("--shard", action="store_true", help="FSDP2 block by block instead of DDP")
    asked = options.parse_args()

    rank, device = 0, "cpu"
    if "RANK" in os.environ:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        rank = dist.get_rank()
        if device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
    elif asked.shard:
        options.error("--shard spreads the model over processes: start it with torchrun --nproc-per-node 2")
    learn(asked.steps, asked.dtype, asked.shard, rank, device)
    if dist.is_initialized():  # nothing of the training lives now: a DDP that outlives its group may hang
        dist.barrier()
        dist.destroy_process_group()


def learn(steps: int, dtype: str, shard: bool, rank: int, device: str) -> None:
    data, vocabulary = corpus()
    train, test = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]
    torch.manual_seed(0)
    amp = amprewrite.rewrite(GPT(vocabulary).to(device), dtype=dtype, granularity="blocks" if shard else "model")
    model: nn.Module = amp
    if shard:
        for block in amp.blocks:
            fully_shard(block)
        fully_shard(amp)
    elif dist.is_initialized():
        model = DistributedDataParallel(amp)

    # From here on nothing knows about precision, scaling or overflow.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    rng = torch.Generator().manual_seed(rank)
    started = time.perf_counter()
    for step in range(steps):
        x, y = batch(train, rng)
        optimizer.zero_grad()
        loss = loss_of(model, x.to(device), y.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if rank == 0 and (step % max(steps // 6, 1) == 0 or step == steps - 1):
            print(f"step {step:4d}  loss {loss.item():.3f} nats a character  {time.perf_counter() - started:5.1f} s", flush=True)

    model.eval()
    rng.manual_seed(99)
    with torch.no_grad():
        losses = [loss_of(model, *(part.to(device) for part in batch(test, rng))).item() for _ in range(10)]
    if rank == 0:
        print(f"\ntest loss {sum(losses) / len(losses):.3f} nats a character\n{amp.loss_scale.report()}")
        print(amp.plan.summary())


if __name__ == "__main__":
    main()
