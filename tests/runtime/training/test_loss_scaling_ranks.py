"""Rewritten models over two ranks: one rank overflows, every rank skips and holds the same scale."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amprewrite
import amprewrite.tables.errors
from amprewrite.runtime.training.loss_scale import DynamicLossScale

KINDS = ("ddp", "ddp blocks", "fsdp2", "fsdp2 blocks", "fsdp1")
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, fused=True),
}
OVERFLOWS = (0, 3, 4)


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def spread(kind: str) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The fp32 original, the rewritten model, and that under one of PyTorch's ways to spread it over ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.manual_seed(0)
    model = Net()
    amp = amprewrite.rewrite(
        model,
        dtype="fp16",
        loss_scale=DynamicLossScale(init=2.0**10),
        granularity="blocks" if kind.endswith("blocks") else "model",
    )
    original = copy.deepcopy(model)
    if kind.startswith("ddp"):
        return original, amp, nn.parallel.DistributedDataParallel(amp)
    if kind == "fsdp1":
        return original, amp, FullyShardedDataParallel(amp, use_orig_params=True, device_id=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2,))
    for block in amp.blocks if kind.endswith("blocks") else ():
        fully_shard(block, mesh=mesh)
    return original, amp, fully_shard(amp, mesh=mesh)


def shards(module: nn.Module) -> list[Tensor]:
    return [(p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in module.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def train(rank: int, kind: str, name: str) -> None:
    import torch.distributed as dist

    _, amp, module = spread(kind)
    optimizer = OPTIMIZERS[name](module.parameters())
    for step in range(6):
        optimizer.zero_grad()
        before = shards(module)
        loss = module(batch(step, rank)).square().mean()
        (loss * (float("inf") if step in OVERFLOWS and rank == 1 else 1.0)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        assert same(before, shards(module)) == (step in OVERFLOWS), (kind, name, rank, step)
    scales: list[Any] = [None, None]
    dist.all_gather_object(scales, amp.loss_scale.state_dict())
    assert scales[0] == scales[1], (kind, name)
    report = amp.loss_scale.report()
    assert (report.scale, report.skipped, report.steps) == (2.0**7, 3, 6), (kind, name, report)
    assert all(state["step"] == 3 for state in optimizer.state.values() if "step" in state)
    assert len(amp.plans) == 1 and len(amp.plan.regions) == (4 if kind.endswith("blocks") else 1), kind


@contextlib.contextmanager
def without_sync(kind: str, module: nn.Module):
    if not kind.startswith("fsdp2"):
        with module.no_sync():
            yield
        return
    module.set_requires_gradient_sync(False)
    yield
    module.set_requires_gradient_sync(True)


def accumulate(rank: int, kind: str) -> None:
    """Two micro-batches, the first without a reduction, the scale moved between them: fp32's mean gradient comes out."""
    original, amp, module = spread(kind)
    with without_sync(kind, module):
        module(batch(1, rank)).square().mean().backward()
    amp.loss_scale.load_state_dict({**amp.loss_scale.state_dict(), "scale": 2.0**13})
    module(batch(2, rank)).square().mean().backward()
    for each in (0, 1):
        (sum(original(batch(step, each)).square().mean() for step in (1, 2)) / 2).backward()
    if kind == "fsdp1":  # the gradients lie in flat shards of both ranks
        return
    for (key, p), q in zip(amp.named_parameters(), original.parameters(), strict=True):
        got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        assert torch.linalg.vector_norm(got - q.grad) < 5e-3 * torch.linalg.vector_norm(q.grad), (kind, key)


def shard_inside_one_graph() -> None:
    """Blocks sharded under a model that was rewritten whole: it still runs, and says what to do."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    amp = amprewrite.rewrite(Net(), dtype="fp16")
    for module in (*amp.blocks, amp):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        amp(batch(0, 0)).sum().backward()
    said = [str(w.message) for w in caught if issubclass(w.category, amprewrite.tables.errors.AmpRewriteWarning)]
    assert any("granularity='blocks'" in text for text in said), said


def keep_no_copy_of_gathered_weights() -> None:
    """FSDP2 gathers weights without telling their versions: cache_weights="step" must not trust those."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    results = []
    for cache_weights in (True, "step"):
        torch.manual_seed(0)
        amp = amprewrite.rewrite(Net(), dtype="bf16", cache_weights=cache_weights)
        fully_shard(amp, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(amp.parameters(), lr=1.0)
        for step in range(3):
            optimizer.zero_grad()
            out = amp(batch(step, 0))
            out.square().mean().backward()
            optimizer.step()
        results.append(out)
    assert torch.equal(*results)
    assert "FSDP gathers the weights anew" in str(amp.plan)


def rank_main(rank: int, store: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", amprewrite.tables.errors.AmpRewriteWarning)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for kind in KINDS:
        for name in OPTIMIZERS:
            if not (kind.startswith("fsdp2") and name == "sgd fused"):  # torch has no fused SGD for DTensors
                train(rank, kind, name)
        accumulate(rank, kind)
    shard_inside_one_graph()
    keep_no_copy_of_gathered_weights()
    gc.collect()
    dist.barrier()  # gloo aborts if a rank leaves while another still talks
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
@pytest.mark.long
def test_ranks_agree_though_only_one_overflows(tmp_path):
    torch.multiprocessing.spawn(rank_main, (str(tmp_path / "store"),), nprocs=2)
