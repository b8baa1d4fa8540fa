"""Train one small network in fp16 over several processes, in each of the ways that PyTorch has to spread it.

    torchrun --nproc-per-node 2 examples/train_distributed.py --way ddp
    torchrun --nproc-per-node 2 examples/train_distributed.py --way fsdp2      low weights on the wire, by amprewrite.gather_low
    torchrun --nproc-per-node 2 examples/train_distributed.py --way tp         tensor parallel
    torchrun --nproc-per-node 2 examples/train_distributed.py --way pp         pipeline parallel, one stage a process

It runs over gloo on the CPU. The third step is given a loss that overflows: every process skips it, and all hold the same loss scale.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import amprewrite

WIDTH, BATCH, OVERFLOWS_AT = 64, 32, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def batch(step: int, part: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1000 * step + part))
    return x, x.roll(1, -1).tanh()


def spread(way: str, ranks: int) -> tuple[Any, nn.Module]:
    """The rewritten model, and what the training loop calls. Rewrite first, then spread."""
    torch.manual_seed(0)
    amp = amprewrite.rewrite(nn.Sequential(*(Block() for _ in range(4))), dtype="fp16", granularity="blocks" if way == "fsdp2" else "model")
    if way == "ddp":
        return amp, DistributedDataParallel(amp)
    if way == "fsdp2":
        for block in amp:
            fully_shard(block)
        return amp, fully_shard(amp)
    plan = {}
    for name, _ in amp.named_children():
        plan |= {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
    return amp, parallelize_module(amp, init_device_mesh("cpu", (ranks,)), plan)


def train(way: str, steps: int, rank: int, ranks: int) -> tuple[Any, float]:
    amp, model = spread(way, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss = torch.zeros(())
    for step in range(steps):
        if way == "fsdp2" and step == 1:  # the first step has captured the graphs
            report = amprewrite.gather_low(amp)
            if rank == 0:
                print(report)
        x, y = batch(step, 0 if way == "tp" else rank)  # ranks of a tensor-parallel model see one batch
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        (loss * (float("inf") if step == OVERFLOWS_AT else 1.0)).backward()
        optimizer.step()
    return amp, loss.item()


def train_pipeline(steps: int, rank: int, ranks: int) -> tuple[Any, float]:
    """Each process has a stage, a rewritten model of its own. The group tells their optimizers to skip together."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(2 * ranks)]
    amp = amprewrite.rewrite(nn.Sequential(*blocks[2 * rank : 2 * rank + 2]), dtype="fp16")
    optimizer = torch.optim.AdamW(amp.parameters(), lr=2e-3)
    amp.attach(optimizer, group=dist.group.WORLD)
    schedule = ScheduleGPipe(PipelineStage(amp, rank, ranks, torch.device("cpu")), n_microbatches=2, loss_fn=F.mse_loss)
    losses: list[Tensor] = []
    for step in range(steps):
        x, y = batch(step, 0)
        optimizer.zero_grad()
        losses.clear()
        schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == ranks - 1 else {}))
        if step == OVERFLOWS_AT and rank == ranks - 1:
            next(amp.parameters()).grad[0] = float("inf")
        optimizer.step()
    return amp, torch.stack(losses).mean().item() if losses else 0.0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--way", choices=["ddp", "fsdp2", "tp", "pp"], default="ddp")
    options.add_argument("--steps", type=int, default=60)
    asked = options.parse_args()

    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if asked.way == "pp":
        amp, loss = train_pipeline(asked.steps, rank, ranks)
    else:
        amp, loss = train(asked.way, asked.steps, rank, ranks)
    scales: list[Any] = [None] * ranks
    dist.all_gather_object(scales, amp.loss_scale.state_dict())
    if rank == ranks - 1:
        agreed = all(each == scales[0] for each in scales)
        print(f"{asked.way}: loss {loss:.4f}; one scale on all ranks: {agreed}\n{amp.loss_scale.report()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
