"""Launches, casts and modelled GPU time of one training step: torch.autocast, ours, O2 written by hand, and a model wholly in half.

    python examples/benchmarks/launches.py [--only bert,vit] [--dtypes bf16,fp16] [--ways autocast,ours,on-cuda,o2,half] [--small]

O2 by hand is the limit of mixed precision with fp32 master weights: the model wholly in half, one multi-tensor cast of the weights and one
of the gradients a step. fp16 is trained with a loss scale and a check of the gradients in every way.

Every ATen op of a whole AdamW step is recorded on a CPU, at published width; products are not computed, for counts need no values. An op
takes the longer of its bytes over the bandwidth and its FLOPs over the rate, and a microsecond. The host starts one every 5 us. A step
takes the longer of the two sums. `on-cuda` is ours without what a plan does for a CPU alone: it keeps ops fp32 in training whose kernels
there add gradients up in the low format, and CUDA's do not. Caches, occupancy and the quality of kernels are left out, so times are
*modelled*: their ratios are what they are for. A CPU splits an LSTM into ops that a GPU fuses. The planner has prices of its own, which
this file does not read.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

import amprewrite
from amprewrite.tables.formats import FORMATS
from amprewrite.tables.ops.op_lists import OPS

sys.path.insert(0, str(Path(__file__).parent))
from nets import MORE, NETS, console

aten = torch.ops.aten
EVERY = NETS | MORE
LAUNCH, HOST = 1e-6, 5e-6
"""Seconds a kernel takes besides its work, and seconds until PyTorch starts the next one."""
TOGETHER = 64
"""Tensors that one launch of a multi-tensor kernel takes."""
ATTAINED = 0.8
"""Share of the peak rate that large products reach."""


@dataclass(frozen=True)
class Gpu:
    """Bytes and FLOPs a second, from NVIDIA's data sheets (dense, TF32 off)."""

    bandwidth: float
    fp32: float
    half: float


GPUS = {"h100": Gpu(3.35e12, 67e12, 989e12), "a100": Gpu(2.04e12, 19.5e12, 312e12), "l4": Gpu(300e9, 30.3e12, 121e12)}
ON_CUDA = {row.name: "infer" for row in OPS.values() if "cpu" in row.low_backward and "cuda" not in row.low_backward}
"""Overrides that leave open what a plan for a CPU keeps fp32 for the sake of its backward."""
PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
    aten.convolution.default, aten.convolution_backward.default,
}  # fmt: skip
FREE = {
    "_unsafe_view", "detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense",
    "lift_fresh", "set_", "resize_", "_reshape_alias", "is_same_size",
}  # fmt: skip


@dataclass
class Step:
    """What one step launched."""

    kernels: list[tuple[str, int, int, int, bool]] = field(default_factory=list)
    """Name, launches, bytes moved, FLOPs, and whether an operand is in half."""
    casts: int = 0

    @property
    def launches(self) -> int:
        return sum(each[1] for each in self.kernels)

    def seconds(self, gpu: Gpu) -> tuple[float, float]:
        """Modelled time of the kernels, and of the step."""
        work = sum(
            max(moved / gpu.bandwidth, flops / ((gpu.half if low else gpu.fp32) * ATTAINED)) + LAUNCH * launches
            for _, launches, moved, flops, low in self.kernels
        )
        return work, max(work, HOST * self.launches)


class Recorder(TorchDispatchMode):
    """Records what would be launched. Products give zeros of the right shape."""

    def __init__(self) -> None:
        super().__init__()
        self.step = Step()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if func in PRODUCTS and all(type(each) in (Tensor, nn.Parameter) and each.is_cpu for each in given):
            on_meta = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
            out = tree_map_only(Tensor, lambda t: torch.zeros_like(t, device="cpu"), func(*on_meta[0], **on_meta[1]))
        else:
            out = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in FREE:
            self._note(func, name, args, kwargs, given, out)
        return out

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], out: Any) -> None:
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        moved = sum(each.numel() * each.element_size() for each in given + made)
        together = name.startswith("_foreach") or name.startswith("_fused_adam") or name.startswith("_amp_foreach")
        launches = -(-len(args[0]) // TOGETHER) if together else 1
        self.step.kernels.append((name, launches, moved, _flops(func, name, args, kwargs, out), any(t.dtype.itemsize == 2 for t in given)))
        if name == "_to_copy":
            self.step.casts += given[0].is_floating_point() and made[0].is_floating_point() and given[0].dtype != made[0].dtype
        elif name == "_foreach_copy_":
            self.step.casts += any(a.dtype != b.dtype for a, b in zip(args[0], args[1], strict=True))


def _flops(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
    if func._overloadpacket in flop_registry:
        return int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):  # two products forward, five backward
        query, key = (args[1], args[2]) if "backward" in name else (args[0], args[1])
        batch, heads, length, width = query.shape
        return (10 if "backward" in name else 4) * batch * heads * length * key.shape[2] * width
    return 0


Loss = Callable[[], Tensor]


def scaled_step(loss: Loss, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    optimizer.zero_grad()
    scaler.scale(loss()).backward()
    scaler.step(optimizer)
    scaler.update()


def o2_step(model: nn.Module, masters: list[nn.Parameter], optimizer: torch.optim.Optimizer, loss: Loss, scale: float) -> None:
    """Half weights and gradients, fp32 masters, as written by hand with multi-tensor ops."""
    own = list(model.parameters())
    optimizer.zero_grad()
    for p in own:
        p.grad = None
    value = loss()
    (value * scale if scale != 1.0 else value).backward()
    live = [(p, master) for p, master in zip(own, masters, strict=True) if p.grad is not None]
    gradients = [torch.empty_like(master) for _, master in live]
    torch._foreach_copy_(gradients, [p.grad for p, _ in live])
    if scale != 1.0:
        device = gradients[0].device
        infinite, inverse = torch.zeros((), device=device), torch.tensor(1.0 / scale, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, infinite, inverse)
    for (_, master), gradient in zip(live, gradients, strict=True):
        master.grad = gradient
    optimizer.step()
    with torch.no_grad():
        torch._foreach_copy_(own, masters)


def record(model: nn.Module, feed: dict[str, Tensor], way: str, dtype: str) -> Step:
    """One AdamW step of a copy of `model`, after another one that captured or warmed up."""
    low, fp16 = FORMATS[dtype].dtype, dtype == "fp16"
    model = copy.deepcopy(model)
    if way in ("o2", "half"):
        model = model.to(low)
        feed = {name: each.to(low) if each.is_floating_point() else each for name, each in feed.items()}
    elif way in ("ours", "on-cuda"):
        model = amprewrite.rewrite(model, dtype=dtype, device="h100", overrides=ON_CUDA if way == "on-cuda" else None)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()] if way == "o2" else list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=1e-4, foreach=True)
    scaler = torch.amp.GradScaler("cpu", enabled=fp16 and way == "autocast")

    def loss() -> Tensor:
        with torch.autocast("cpu", low, enabled=way == "autocast"):
            found: Tensor = model(**feed)
        return found.float()

    def step() -> None:
        if way == "o2":
            o2_step(model, masters, optimizer, loss, 65536.0 if fp16 else 1.0)
        else:
            scaled_step(loss, optimizer, scaler)

    with Recorder():
        step()
    with Recorder() as recorder:
        step()
    return recorder.step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", type=lambda text: text.split(","), default=[name for name in EVERY if name != "odd_mlp"])
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["bf16", "fp16"])
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["autocast", "ours", "on-cuda", "o2", "half"])
    parser.add_argument("--small", action="store_true", help="nets scaled down")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--ops", action="store_true", help="list the ops of which ours has another number than O2")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    table = Table(title="One training step; times are modelled, against autocast's (above 1: faster)", title_justify="left")
    for column in ("net", "dtype", "way", "launches", "casts", "GB"):
        table.add_column(column, justify="left" if column in ("net", "dtype", "way") else "right", no_wrap=True)
    for name in GPUS:
        table.add_column(f"{name}: kernels", justify="right")
        table.add_column("step", justify="right")
    for name in options.only:
        for dtype in options.dtypes:
            torch.manual_seed(0)
            torch._dynamo.reset()  # else sizes of the net before this one make those of this one dynamic
            model, feed = EVERY[name].make(not options.small, options.batch)
            steps = {}
            for way in options.ways:
                try:
                    steps[way] = record(model, feed, way, dtype)
                except RuntimeError as error:
                    print(f"{name} {dtype} {way}: does not run on this CPU ({str(error).splitlines()[0][:60]})", flush=True)
            if not steps:
                continue
            base = steps.get("autocast", next(iter(steps.values())))
            for way, step in steps.items():
                times = [
                    f"{was / now:.2f}" for gpu in GPUS.values() for was, now in zip(base.seconds(gpu), step.seconds(gpu), strict=True)
                ]
                moved = sum(each[2] for each in step.kernels) / 1e9
                table.add_row(name, dtype, way, str(step.launches), str(step.casts), f"{moved:.2f}", *times)
                print(f"{name} {dtype} {way}: {step.launches} launches, {step.casts} casts", flush=True)
            if options.ops and {"ours", "o2"} <= steps.keys():
                ours, by_hand = (_counts(steps[way]) for way in ("ours", "o2"))
                for op in sorted(ours.keys() | by_hand.keys()):
                    if ours[op] != by_hand[op]:
                        print(f"  {op}: {ours[op]} for {by_hand[op]}")
    console().print(table)


def _counts(step: Step) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name, launches, *_ in step.kernels:
        counts[name] += launches
    return counts


if __name__ == "__main__":
    main()
