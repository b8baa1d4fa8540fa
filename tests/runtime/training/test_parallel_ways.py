"""fp16 under DDP, FSDP2, tensor parallel and a pipeline: one rank overflows, all skip together, and training goes as in fp32."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import on_two_ranks
from torch import Tensor, nn

import amprewrite
from amprewrite import DynamicLossScale, PolicyError
from amprewrite.runtime.captured import look_ahead

WIDTH, STEPS, OVERFLOWS = 16, 6, (1, 3)
START = 2.0**12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def fp32_weights(ranks: int) -> dict[str, Tensor]:
    """What fp32 training without the overflowing steps comes to, on the mean of the ranks' losses."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        if step not in OVERFLOWS:
            optimizer.zero_grad()
            (sum(model(batch(step, rank)).square().mean() for rank in range(ranks)) / ranks).backward()
            optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()


def hold(way: str, amp: nn.Module, optimizer: Any, wanted: dict[str, Tensor], steps: int) -> None:
    """All ranks hold one scale, skipped the same steps, and came to fp32's weights within what fp16 rounds."""
    import torch.distributed as dist

    report = amp.loss_scale.report()
    assert (report.scale, report.steps, report.skipped) == (START / 4, STEPS, len(OVERFLOWS)), (way, report)
    told: list[Any] = [None, None]
    dist.all_gather_object(told, (amp.loss_scale.state_dict(), steps))
    assert told[0] == told[1] and steps == STEPS - len(OVERFLOWS), (way, told)
    start = network().state_dict()
    for name, value in amp.state_dict().items():
        moved = torch.linalg.vector_norm(wanted[name] - start[name])
        assert torch.linalg.vector_norm(whole(value) - wanted[name]) < 0.02 * moved, (way, name)


def train(way: str, amp: Any, model: nn.Module, rank: int, seed: int, ranks: int, make: Any = torch.optim.SGD) -> None:
    optimizer = make(model.parameters(), lr=0.05, momentum=0.9)
    steps = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        before = [whole(p).clone() for p in model.parameters()]
        loss = model(batch(step, seed)).square().mean()
        (loss * (float("inf") if step in OVERFLOWS and (rank == 1 or way == "tp") else 1.0)).backward()
        optimizer.step()
        steps += not all(torch.equal(a, whole(b)) for a, b in zip(before, model.parameters(), strict=True))
    hold(way, amp, optimizer, fp32_weights(ranks), steps)


def rewritten(model: nn.Module, **options: Any) -> Any:
    return amprewrite.rewrite(model, dtype="fp16", loss_scale=DynamicLossScale(init=START), **options)


def ddp(rank: int) -> None:
    amp = rewritten(network())
    train("ddp", amp, nn.parallel.DistributedDataParallel(amp), rank, rank, 2)


def zero(rank: int) -> None:
    """Each rank steps its part of the weights, which are views of buckets that `step` itself makes and broadcasts."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    amp = rewritten(network())
    make = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, parameters_as_bucket_view=True)
    train("zero", amp, nn.parallel.DistributedDataParallel(amp), rank, rank, 2, make)


def fsdp2(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    amp = rewritten(network(), granularity="blocks")
    for block in amp:
        fully_shard(block)
    train("fsdp2", amp, fully_shard(amp), rank, rank, 2)


def tensor_parallel(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    plan = {name: style for at in "01" for name, style in ((f"{at}.up", ColwiseParallel()), (f"{at}.down", RowwiseParallel()))}
    for first in ("rewrite", "parallelize"):
        if first == "rewrite":
            amp = rewritten(network())
            parallelize_module(amp, mesh, plan)
        else:
            amp = rewritten(parallelize_module(network(), mesh, plan))
        train("tp", amp, amp, rank, 0, 1)


class Hidden(nn.Module):
    """On rank 1 its hidden values leave fp16's range, though its result does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            self.up.weight.fill_(1.0)
            self.up.weight[WIDTH:] = 1e4
            self.down.weight.fill_(1e-4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def tensor_parallel_looks_ahead(rank: int) -> None:
    """One rank alone sees the danger; all decide by what it sees, and their collectives match."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    x = torch.ones(4, WIDTH)
    for local in (True, False):  # between the layers there are plain tensors, or DTensors
        styles = {"up": ColwiseParallel(use_local_output=local), "down": RowwiseParallel()}
        model = parallelize_module(Hidden(), init_device_mesh("cpu", (2,)), styles)
        amp = amprewrite.rewrite(model, dtype="fp16", strict=True)
        torch.testing.assert_close(amp(x), Hidden()(x), rtol=2e-3, atol=0)
        told: list[Any] = [None, None]
        dist.all_gather_object(told, str(amp.plan))
        assert told[0] == told[1] and "decided anew" in told[0], told


def tensor_parallel_gives_up_looking(rank: int) -> None:
    """One rank alone sees an infinity in its results; all stop looking at calls, for each look is a run with collectives."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    amp = rewritten(parallelize_module(Hidden(), init_device_mesh("cpu", (2,)), styles))
    x = torch.ones(4, WIDTH)
    real, looks = look_ahead.all_finite, []

    def seen(value: Any) -> bool:
        looks.append(torch.is_grad_enabled())
        return real(value) and (rank == 0 or not looks[-1])  # the fp32 run is without gradients, the call itself with them

    with mock.patch.object(look_ahead, "all_finite", seen), pytest.warns(amprewrite.AmpRewriteWarning, match="does not help"):
        amp(x)
    assert looks.count(True) == 1, looks
    looks.clear()
    with mock.patch.object(look_ahead, "all_finite", seen):
        amp(x)
    assert not looks


def pipeline(rank: int) -> None:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    for schedule_of in (ScheduleGPipe, Schedule1F1B):
        amp = rewritten(nn.Sequential(network()[rank]))
        stage = PipelineStage(amp, rank, 2, torch.device("cpu"))
        optimizer = torch.optim.SGD(amp.parameters(), lr=0.05, momentum=0.9)
        amp.attach(optimizer, group=dist.group.WORLD)
        now = {"step": 0}

        def loss_of(output: Tensor, target: Tensor, now: dict[str, int] = now) -> Tensor:
            return output.square().mean()

        schedule = schedule_of(stage, n_microbatches=2, loss_fn=loss_of)
        steps = 0
        for step in range(STEPS):
            now["step"] = step
            optimizer.zero_grad()
            before = [p.detach().clone() for p in amp.parameters()]
            schedule.step(batch(step)) if rank == 0 else schedule.step(target=torch.zeros(8, WIDTH))
            if step in OVERFLOWS and rank == 1:  # in the last stage alone
                amp[0].up.weight.grad[0, 0] = float("inf")
            optimizer.step()
            steps += not all(map(torch.equal, before, amp.parameters()))
        wanted = {f"0.{name.partition('.')[2]}": value for name, value in fp32_weights(1).items() if name.startswith(f"{rank}.")}
        report = amp.loss_scale.report()
        told: list[Any] = [None, None]
        dist.all_gather_object(told, (amp.loss_scale.state_dict(), steps, report.skipped))
        assert told[0] == told[1] and steps == STEPS - len(OVERFLOWS) and report.scale == START / 4, (told, report)
        start = network()[rank].state_dict()
        for name, value in amp.state_dict().items():
            moved = torch.linalg.vector_norm(wanted[name] - start[name.partition(".")[2]])
            assert torch.linalg.vector_norm(value - wanted[name]) < 0.02 * moved, name


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
@pytest.mark.long
def test_all_ranks_skip_together_and_train_as_fp32_does(tmp_path):
    on_two_ranks(tmp_path, ddp, zero, fsdp2, tensor_parallel, tensor_parallel_looks_ahead, tensor_parallel_gives_up_looking, pipeline)


def test_a_group_that_is_none_is_refused():
    amp = rewritten(network())
    with pytest.raises(PolicyError, match=r"group= takes a torch.distributed process group.*not int"):
        amp.attach(torch.optim.SGD(amp.parameters(), 0.1), group=2)
