"""Fifty fp16 steps with overflows under a trainer, whole or from its checkpoint of step 25: `resume_program.py LIBRARY WAY FOLDER PART`.

Prints the losses of the last 25 steps and a digest of weights, optimizer state, learning rate and loss scale, as JSON; under
torchrun each rank does.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import amprewrite

STEPS, HALF = 50, 25
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SCALE = {"init": 2.0**22, "growth_interval": 4}
"""Overflows at once, and again whenever it has grown too large."""


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 4 * STEPS * RANKS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum(-1, keepdim=True)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.second(torch.relu(self.first(x)))
        return {"logits": y} if labels is None else {"loss": (y - labels).square().mean(), "logits": y}


def scale() -> amprewrite.DynamicLossScale:
    return amprewrite.DynamicLossScale(**SCALE)


def told(losses: Iterable[float], model: nn.Module, optimizer: Any, amp: Any) -> None:
    state = optimizer.state_dict()
    numbers = [(p.to_local() if hasattr(p, "to_local") else p).tolist() for p in model.parameters()]
    held = [[value for value in each.values() if value.dim()] for each in state["state"].values()]
    numbers += [[(value.to_local() if hasattr(value, "to_local") else value).tolist() for value in each] for each in held]
    report = amp.loss_scale.report()
    facts = [report.scale, report.steps, report.skipped, state["param_groups"][0]["lr"]]
    digest = hashlib.sha256(json.dumps([numbers, amp.loss_scale.state_dict()]).encode()).hexdigest()
    print("RESULT" + json.dumps({"rank": RANK, "losses": list(losses)[-HALF:], "facts": facts, "digest": digest}), flush=True)


def run_loop(way: str, folder: Path, resume: bool) -> None:
    """A loop of one's own on two ranks, with DDP and torch.save, or FSDP2 and torch.distributed.checkpoint."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    amp: Any = amprewrite.rewrite(Net(), dtype="fp16", loss_scale=scale())
    model: Any = fully_shard(amp) if way == "fsdp2" else nn.parallel.DistributedDataParallel(amp)
    stepped = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows, file = Rows(), folder / "ddp.pt"

    def state() -> dict[str, Any]:
        weights, optimizer = get_state_dict(model, stepped)
        return {"model": weights, "optimizer": optimizer}

    if resume and way == "fsdp2":
        loaded = state()
        dcp.load(loaded, checkpoint_id=folder / "fsdp2")
        set_state_dict(model, stepped, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    elif resume:
        loaded = torch.load(file, weights_only=True)
        amp.load_state_dict(loaded["model"])
        stepped.load_state_dict(loaded["optimizer"])
    losses = []
    for step in range(HALF if resume else 0, STEPS):
        if step == HALF and not resume:
            if way == "fsdp2":
                dcp.save(state(), checkpoint_id=folder / "fsdp2")
            elif RANK == 0:
                torch.save({"model": amp.state_dict(), "optimizer": stepped.state_dict()}, file)
        batch = [rows[(RANKS * step + RANK) * 4 + place] for place in range(4)]
        loss = model(torch.stack([each["x"] for each in batch]), torch.stack([each["labels"] for each in batch]))["loss"]
        stepped.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepped.step()
        losses.append(loss.item())
    told(losses, model, stepped, amp)


def run_trainer(way: str, folder: Path, resume: bool) -> None:
    from transformers import Trainer, TrainingArguments

    from amprewrite.integrations.transformers import AmpRewriteCallback

    model = Net()
    callbacks = [AmpRewriteCallback(dtype="fp16", loss_scale=scale())] if way == "callback" else []
    amp = model if callbacks else amprewrite.rewrite(model, dtype="fp16", loss_scale=scale())
    args = TrainingArguments(
        str(folder), max_steps=STEPS, save_steps=HALF, logging_steps=1, report_to=[], use_cpu=True, learning_rate=1e-2, warmup_steps=5,
        per_device_train_batch_size=4, disable_tqdm=True, max_grad_norm=1.0,
    )  # fmt: skip
    trainer = Trainer(amp, args, train_dataset=Rows(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}") if resume else None)
    told([each["loss"] for each in trainer.state.log_history if "loss" in each], model, trainer.optimizer, amp)


def run_accelerate(way: str, folder: Path, resume: bool) -> None:
    from accelerate import Accelerator

    from amprewrite.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    model = Net()
    stepped = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(stepped, 1.0, 0.1, STEPS)
    loader = DataLoader(Rows(), batch_size=4)
    if way == "prepare":
        amp, stepped, loader, scheduler = prepare(accelerator, model, stepped, loader, scheduler, dtype="fp16", loss_scale=scale())
    else:
        amp, stepped, loader, scheduler = accelerator.prepare(
            amprewrite.rewrite(model, dtype="fp16", loss_scale=scale()), stepped, loader, scheduler
        )
    if resume:
        accelerator.load_state(str(folder))
        loader = accelerator.skip_first_batches(loader, HALF)
    losses = []
    for step, batch in enumerate(loader, start=HALF if resume else 0):
        if step == HALF and not resume:
            accelerator.save_state(str(folder))
        loss = amp(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(amp.parameters(), 1.0)
        stepped.step()
        scheduler.step()
        stepped.zero_grad()
        losses.append(loss.item())
    told(losses, model, stepped, accelerator.unwrap_model(amp))


def run_lightning(way: str, folder: Path, resume: bool) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from amprewrite.integrations.lightning import AmpRewritePrecision

    losses: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.net(**batch)["loss"]
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            stepped = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.LinearLR(stepped, 1.0, 0.1, STEPS)
            return {"optimizer": stepped, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module = Module()
    plugins = [AmpRewritePrecision("fp16", loss_scale=scale())] if way == "plugin" else []
    if not plugins:
        amprewrite.rewrite(module, dtype="fp16", loss_scale=scale(), inplace=True)
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS, strategy="ddp" if RANKS > 1 else "auto", max_epochs=2, limit_train_batches=HALF,
        plugins=plugins, callbacks=[saver], logger=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Rows(), batch_size=4), ckpt_path=str(folder / "epoch=0.ckpt") if resume else None)
    told(losses, module.net, trainer.optimizers[0], module)


def leave_group() -> None:
    """End the process group once nothing of the training lives.

    A DDP that dies after its group ends gloo's threads itself, and holds the GIL meanwhile. A thread that lets go of its last
    collective may wait for the GIL, and both wait for ever.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    library, way, folder, part = sys.argv[1:]
    torch.manual_seed(0)
    programs = {"loop": run_loop, "trainer": run_trainer, "accelerate": run_accelerate, "lightning": run_lightning}
    programs[library](way, Path(folder), part == "resumed")
    leave_group()
