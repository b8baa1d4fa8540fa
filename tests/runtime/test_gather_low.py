"""FSDP2 sends weights in the format in which the plan reads them, and nobody ever reads a rounded weight in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import GatheredBytes, on_two_ranks
from torch import Tensor, nn

import amprewrite
from amprewrite import CaptureError, PolicyError
from amprewrite.api.gather_low import ANOTHER_RANK
from amprewrite.runtime.model.rewritten import session_of
from amprewrite.runtime.weights.weight_reads import WeightReads

WIDTH = 32


class Products(nn.Module):
    """A block whose weights are all read low."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class Mixed(nn.Module):
    """A block with weights that are read low, weights that are read in fp32, and odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 45), nn.Linear(45, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 7))

    def forward(self, x: Tensor, way: str = "") -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x)))) * torch.logsumexp(self.gain, 0)
        if way == "more":
            x = x + torch.logsumexp(self.up.weight, 0).sum()
        if way == "break":
            torch._dynamo.graph_break()
            x = x + torch.logsumexp(self.up.weight, 0).sum()
        return x


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, **options)
        return x


def shard(amp: Any, reshard: bool | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for each in amp.blocks:
        fully_shard(each, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(amp, mesh=mesh)


def sharded(block: type[nn.Module], reshard: bool | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    return shard(amprewrite.rewrite(Net(block), granularity="blocks", **{"dtype": "bf16", **options}), reshard)


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def local(tensors: Any) -> list[Tensor]:
    return [each.to_local().detach().clone() for each in tensors]


def steps(amp: Any, rank: int, count: int = 3, overflow: int = -1, **options: Any) -> tuple[list[Tensor], int]:
    """Every output, gradient and weight of a training run, and the bytes gathered in it. Rank 1 overflows at one step."""
    optimizer = torch.optim.AdamW(amp.parameters(), lr=1e-2)
    seen: list[Tensor] = []
    with GatheredBytes() as wire:
        for step in range(count):
            optimizer.zero_grad()
            out = amp(batch(rank, step), **options)
            (out.square().mean() * (float("inf") if step == overflow and rank == 1 else 1.0)).backward()
            seen += [out.detach().clone(), *(each.nan_to_num() for each in local(p.grad for p in amp.parameters()))]
            optimizer.step()
            seen += local(amp.parameters())
    return seen, wire.bytes


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# -- what the ranks do ------------------------------------------------------------------------------
def half_the_bytes(rank: int) -> None:
    """Of weights that are all read low, through steps one of which overflows; what is kept of the model stays fp32."""
    for dtype in ("bf16", "fp16"):
        before, now = (sharded(Products, dtype=dtype) for _ in range(2))
        steps(before, rank, 1)
        steps(now, rank, 1)
        report = amprewrite.gather_low(now)
        overflow = 1 if dtype == "fp16" else -1
        (wanted, fp32_bytes), (got, low_bytes) = steps(before, rank, overflow=overflow), steps(now, rank, overflow=overflow)
        assert same(wanted, got), dtype
        assert 0 < low_bytes <= 0.51 * fp32_bytes, (low_bytes, fp32_bytes)
        assert len(report.low) == 8 and not report.full and 2 * report.bytes_now == report.bytes_before
        assert "gather_low: 8 of 8 sharded weights travel as" in str(now.plan)
        assert type(next(iter(now.state_dict().values())).to_local()) is Tensor
        assert same(local(before.state_dict().values()), local(now.state_dict().values()))
    assert now.loss_scale.report().skipped == before.loss_scale.report().skipped == 1
    copied_by_the_user(rank, now)


def copied_by_the_user(rank: int, amp: Any) -> None:
    """`unshard` of the user's gathers fp32, and so does what comes after until it is freed."""
    block = amp.blocks[0]
    shards = local([block.up.weight])
    block.unshard()
    size = block.up.weight.shape[0] // 2
    assert torch.equal(block.up.weight[rank * size : (rank + 1) * size], shards[0])
    amp(batch(rank))
    block.reshard()


def mixed(rank: int) -> None:
    """Weights read low and in fp32 share a message. What later reads a rounded weight in fp32 is an error, and then gets it in fp32."""
    before, now = sharded(Mixed), sharded(Mixed)
    steps(before, rank, 1)
    steps(now, rank, 1)
    asked_of_one_rank(rank, now)
    report = amprewrite.gather_low(now)
    assert {f"blocks.{place}.{name}.weight" for place in (0, 1) for name in ("up", "down")} <= {*report.low}
    assert all("reads it in fp32" in report.full[f"blocks.{place}.gain"] for place in (0, 1))
    (wanted, fp32_bytes), (got, low_bytes) = steps(before, rank), steps(now, rank)
    assert same(wanted, got) and low_bytes < 0.6 * fp32_bytes, (low_bytes, fp32_bytes)
    with torch.no_grad():
        assert torch.equal(before.eval()(batch(rank)), now.eval()(batch(rank)))
    before.train(), now.train()
    late_readers(rank, before, now)


def asked_of_one_rank(rank: int, amp: Any) -> None:
    """What one rank needs in fp32 travels so on all of them."""
    region = session_of(amp).entries["blocks.0"].graphs.regions[0]
    reads = region.reads
    if rank == 0:
        region.reads = WeightReads(full=frozenset(["blocks.0.up.weight"]))
    report = amprewrite.gather_low(amp)
    assert report.full["blocks.0.up.weight"] == ("Net.blocks.0 reads it in fp32" if rank == 0 else ANOTHER_RANK)
    region.reads = reads
    amp(batch(rank))


def late_readers(rank: int, before: Any, now: Any) -> None:
    hook = now.blocks[0].register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(CaptureError, match=r"has forward hooks that see weights which gather_low sends rounded; call"):
        now(batch(rank))
    report = amprewrite.gather_low(now)
    assert report.full["blocks.0.up.weight"] == "hooks of others on it see its weights" and "blocks.1.up.weight" in report.low
    hook.remove()
    assert "blocks.0.up.weight" in amprewrite.gather_low(now).low
    now.blocks[0].unshard()  # fp32 for this forward, and rounded for its backward
    with pytest.raises(CaptureError, match=r"reads blocks.0.up.weight in fp32.*call amprewrite.gather_low\(amp\) on all ranks"):
        now(batch(rank), way="more")
    assert "reads it in fp32" in amprewrite.gather_low(now).full["blocks.0.up.weight"]
    with pytest.raises(CaptureError, match=r"reads blocks.1.up.weight in fp32"):
        now(batch(rank), way="more")
    report = amprewrite.gather_low(now)
    assert report.low == ("blocks.0.down.weight", "blocks.0.up.bias", "blocks.1.down.weight", "blocks.1.up.bias"), report.low
    assert same(steps(before, rank, 2, way="more")[0], steps(now, rank, 2, way="more")[0])
    with pytest.raises(CaptureError, match=r"blocks.0 ran code outside its graph, which may read weights that gather_low sends rounded"):
        now(batch(rank), way="break")
    assert "code outside its graph" in amprewrite.gather_low(now).full["blocks.0.up.bias"]


def where_weights_stay(rank: int) -> None:
    """Weights that stay gathered between calls are seen by any code: they travel in fp32, and the report says why."""
    amp = sharded(Products, reshard=False)
    steps(amp, rank, 1)
    report = amprewrite.gather_low(amp)
    assert not report.low and all("fully_shard(..., reshard_after_forward=True)" in why for why in report.full.values())
    torch.manual_seed(0)
    from torch.distributed.fsdp import fully_shard

    whole = amprewrite.rewrite(Net(Products), dtype="bf16")
    fully_shard(whole, reshard_after_forward=True)
    steps(whole, rank, 1)
    report = amprewrite.gather_low(whole)
    assert len(report.low) == 8 and "8 of 8 sharded weights travel as bf16" in str(report)
    inside = shard(amprewrite.rewrite(Net(Products), dtype="bf16", granularity=["blocks.0"]))
    steps(inside, rank, 1)
    report = amprewrite.gather_low(inside)
    assert "blocks.0.up.weight" in report.low


RANKS = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")


@RANKS
@pytest.mark.long
def test_on_two_ranks(tmp_path):
    on_two_ranks(tmp_path, half_the_bytes, mixed, where_weights_stay)


def test_it_says_what_it_needs():
    with pytest.raises(PolicyError, match="takes a rewritten model, not Linear"):
        amprewrite.gather_low(nn.Linear(2, 2))
    with pytest.raises(PolicyError, match="nothing in this model went through fully_shard"):
        amprewrite.gather_low(amprewrite.rewrite(nn.Linear(2, 2), dtype="bf16"))
