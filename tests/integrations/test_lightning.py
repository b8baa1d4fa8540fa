"""The precision plugin of Lightning and Fabric, on the real library."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_help import MLP, data
from torch import nn
from torch.utils.data import DataLoader

import amprewrite
from amprewrite import DynamicLossScale
from amprewrite.runtime.model.rewritten import is_rewritten

lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install 'amprewrite[lightning]'")
plugin = pytest.importorskip("amprewrite.integrations.lightning")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::DeprecationWarning", "ignore::FutureWarning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self, optimizer: Any = torch.optim.AdamW, by: str = "step") -> None:
        super().__init__()
        self.net, self.make, self.by = MLP(), optimizer, by
        self.losses: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return loss

    def test_step(self, batch: torch.Tensor, index: int) -> None:
        self.losses.append(self.net(batch).square().mean().item())

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.by}}


def batches(count: int = 6) -> Any:
    return DataLoader([data(8, seed=i) for i in range(4 * count)], batch_size=4)


def trainer(precision: Any, **options: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu", max_epochs=1, plugins=[precision] if precision else [], logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, **options,
    )  # fmt: skip


def module(**options: Any) -> Module:
    torch.manual_seed(0)
    return Module(**options)


def test_it_trains_the_module_itself_in_low_precision():
    ours, plain = module(), module()
    trainer(plugin.AmpRewritePrecision("bf16")).fit(ours, batches())
    assert is_rewritten(ours) and ours.plan.low == "bf16"
    trainer(None).fit(plain, batches())
    assert ours.losses != plain.losses
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(plain.losses), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("clip", [None, 0.5], ids=["unclipped", "clipped"])
def test_fp16_is_bitwise_a_loop_of_ones_own(fused: bool, clip: float | None):
    """With clipping and fused optimizers too, which Lightning's own mixed precision refuses together."""

    def adamw(params: Any, lr: float) -> Any:
        return torch.optim.AdamW(params, lr=lr, fused=fused)

    ours, own = module(optimizer=adamw), module(optimizer=adamw)
    scale = {"init": 2.0**24}
    trainer(plugin.AmpRewritePrecision("fp16", loss_scale=DynamicLossScale(**scale)), gradient_clip_val=clip).fit(ours, batches(12))
    amp = amprewrite.rewrite(own.net, dtype="fp16", loss_scale=DynamicLossScale(**scale))
    optimizer = adamw(own.parameters(), lr=0.1)
    losses, rates, skips = [], [], 0
    for batch in batches(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        loss = amp(batch).square().mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(own.parameters(), clip)
        optimizer.step()
        skipped = amp.loss_scale.consecutive_skips() > 0
        skips += skipped
        optimizer.param_groups[0]["lr"] *= 1.0 if skipped else 0.5
        losses.append(loss.item())
    assert ours.losses == losses and ours.rates == rates
    assert skips > 3 and ours.loss_scale.report().skipped == skips


def test_a_schedule_by_epochs_is_lightnings_own():
    ours = module(by="epoch")
    runner = trainer(plugin.AmpRewritePrecision("fp16"))
    runner.fit(ours, batches())
    assert not isinstance(runner.lr_scheduler_configs[0].scheduler, plugin.HeldSchedule)
    assert runner.lr_scheduler_configs[0].scheduler.last_epoch == 1


def test_fit_test_and_fit_again():
    ours, precision = module(), plugin.AmpRewritePrecision("fp16")
    for _ in range(2):
        trainer(precision).fit(ours, batches(2))
        plan = ours.plan
        trainer(precision).test(ours, batches(1), verbose=False)
        assert ours.plan.low == plan.low == "fp16"
    assert ours.loss_scale.report().steps == 4


def test_the_state_of_the_plugin_is_that_of_the_scale():
    ours, precision = module(), plugin.AmpRewritePrecision("fp16")
    trainer(precision).fit(ours, batches(2))
    assert precision.state_dict() == {"0": ours.loss_scale.state_dict()}
    fresh = plugin.AmpRewritePrecision("fp16")
    again = module()
    fresh.convert_module(again)
    fresh.load_state_dict(precision.state_dict())
    assert again.loss_scale.state_dict() == ours.loss_scale.state_dict()
    assert plugin.AmpRewritePrecision("bf16").state_dict() == {}


def test_manual_optimization_with_two_optimizers():
    class Two(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = MLP(), MLP()
            self.automatic_optimization = False

        def training_step(self, batch: torch.Tensor, index: int) -> None:
            for net, optimizer in zip((self.one, self.two), self.optimizers(), strict=True):
                optimizer.zero_grad()
                loss = net(batch).square().mean()
                self.manual_backward(loss * (torch.inf if index == 1 else 1.0))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.one, self.two)]

    ours = Two()
    trainer(plugin.AmpRewritePrecision("fp16", loss_scale=256)).fit(ours, batches(3))
    assert all(p.isfinite().all() for p in ours.parameters())
    report = ours.loss_scale.report()
    assert (report.steps, report.skipped) == (6, 2)


def test_fabric(tmp_path: Path):
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin.AmpRewritePrecision("fp16", loss_scale=2.0**8)])
    torch.manual_seed(0)
    net = MLP()
    before = net(data())
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    result = model(data())
    assert net.plan.low == "fp16" and result.dtype is torch.float32 and not torch.equal(result, before)
    weights = [p.detach().clone() for p in net.parameters()]
    fabric.backward(result.sum() * torch.inf)
    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    optimizer.step()
    assert all(map(torch.equal, weights, net.parameters())) and net.loss_scale.report().skipped == 1
    fabric.save(str(tmp_path / "state.ckpt"), {"model": model, "optimizer": optimizer})
    fabric.load(str(tmp_path / "state.ckpt"), {"model": model, "optimizer": optimizer})
    optimizer.zero_grad()
    fabric.backward(model(data()).sum())
    optimizer.step()
    assert not any(map(torch.equal, weights, net.parameters()))


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_ddp_over_two_processes():
    """Lightning's DDP strategy drops what `convert_module` returns: the module itself must be the rewritten one."""
    ours = module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = trainer(plugin.AmpRewritePrecision("fp16"), strategy="ddp_fork", devices=2)
        runner.fit(ours, batches(4))
    assert runner.global_step > 0
