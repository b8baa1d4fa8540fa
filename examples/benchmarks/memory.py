"""Peak bytes of one training step: torch.autocast, ours, and O2 written by hand.

    python examples/benchmarks/memory.py [--only bert,vit] [--dtypes bf16,fp16] [--full] [--where]

Every storage that an ATen op makes is counted from the moment it is made until nothing refers to it, so figures are exact and the same
on every run. What a kernel takes for itself, and memory that an allocator keeps, are not in them. The step is forward, backward and a
fused AdamW; fp16 is trained with a loss scale and its checks. fp32 weights, the optimizer's state and the inputs are left out, for
every way has them. What a way keeps between steps besides those, such as low weights, counts.

With `--full` nets have their published size, and products are not computed: storages need no values.

`backward` is the peak from the first op to the last gradient. `--where` lists what lives at that peak, by the op that made it.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import amprewrite
from amprewrite.tables.formats import FORMATS

sys.path.insert(0, str(Path(__file__).parent))
from launches import PRODUCTS
from nets import MORE, NETS, console

EVERY = NETS | MORE
WAYS = ("autocast", "ours", "o2")


class Live(TorchDispatchMode):
    """Bytes of the storages that ops have made and that something still refers to, and the most there were."""

    def __init__(self, computes: bool = True) -> None:
        super().__init__()
        self.computes = computes
        self.bytes = self.peak = 0
        self.seen: dict[int, tuple[str, int]] = {}
        """Name of the op and bytes, by the address of the storage's handle."""
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.at_peak: Counter[str] = Counter()
        self.where = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs) if self.computes or func not in PRODUCTS else self.zeros(func, args, kwargs)
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self.add(made, func._schema.name.partition("::")[2])
        return out

    @staticmethod
    def zeros(func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` would give, in shape; values of zero take no memory of the machine until they are written."""
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not all(type(each) in (Tensor, nn.Parameter) and each.is_cpu for each in given):
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        return tree_map_only(Tensor, lambda t: torch.zeros_like(t, device="cpu"), func(*args, **kwargs))

    def add(self, tensor: Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.seen or tensor.is_meta:
            return
        self.seen[key] = (f"{name} {str(tensor.dtype).partition('.')[2]} {tuple(tensor.shape)}", storage.nbytes())
        self.bytes += storage.nbytes()
        weakref.finalize(storage, self.gone, key).atexit = False
        self.storages[key] = weakref.ref(storage)
        if self.bytes > self.peak:
            self.look_again()
        if self.bytes > self.peak:
            self.peak = self.bytes
            if self.where:
                self.at_peak = Counter()
                for what, size in self.seen.values():
                    self.at_peak[what] += size

    def look_again(self) -> None:
        """Sizes as they are now: a storage can be let go of while something refers to it."""
        for key, (name, size) in self.seen.items():
            storage = self.storages[key]() if size else None
            if storage is not None and storage.nbytes() < size:
                self.seen[key] = name, storage.nbytes()
                self.bytes += storage.nbytes() - size

    def gone(self, key: int) -> None:
        self.bytes -= self.seen.pop(key)[1]
        del self.storages[key]


@dataclass(frozen=True)
class Peak:
    backward: int
    """Bytes from the first op to the last gradient."""
    step: int
    """Bytes of the whole step."""
    kept: int
    """Bytes that stay between steps."""
    at: Counter[str]


def known(*groups: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tree_leaves(groups) if isinstance(tensor, Tensor)}


def peak(model: nn.Module, feed: dict[str, Tensor], way: str, dtype: str, where: bool = False, computes: bool = True) -> Peak:
    """One AdamW step of a copy of `model`, after two that captured and warmed up."""
    low, fp16 = FORMATS[dtype].dtype, dtype == "fp16"
    model = copy.deepcopy(model)
    masters = list(model.parameters())
    if way == "o2":
        masters = [nn.Parameter(p.detach().clone()) for p in masters]
        model = model.to(low)
        feed = {name: each.to(low) if each.is_floating_point() else each for name, each in feed.items()}
    elif way == "ours":
        model = amprewrite.rewrite(model, dtype=dtype)
    own = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=fp16 and way == "autocast")
    live = Live(computes)

    def backward() -> None:
        with torch.autocast("cpu", low, enabled=way == "autocast"):
            loss = model(**feed).float()
        if way != "o2":
            scaler.scale(loss).backward()
            return
        (loss * 65536.0 if fp16 else loss).backward()
        del loss
        pairs = [(p, master) for p, master in zip(own, masters, strict=True) if p.grad is not None]
        gradients = [torch.empty_like(master) for _, master in pairs]
        torch._foreach_copy_(gradients, [p.grad for p, _ in pairs])
        if fp16:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros(()), torch.tensor(1.0 / 65536.0))
        for (p, master), gradient in zip(pairs, gradients, strict=True):
            p.grad, master.grad = None, gradient

    def step() -> int:
        optimizer.zero_grad()
        backward()
        after = live.peak
        scaler.step(optimizer)
        scaler.update()
        if way == "o2":
            with torch.no_grad():
                torch._foreach_copy_(own, masters)
        optimizer.zero_grad()
        return after

    with live:
        step()
        step()
        hidden = known(masters, optimizer.state_dict(), feed, list(model.buffers()))
        for key in hidden & live.seen.keys():
            live.bytes -= live.seen[key][1]
            live.seen[key] = (live.seen[key][0], 0)
        if way == "o2":  # what it has besides the masters; made before anything was counted
            for each in own:
                live.add(each, "low weight")
        kept = live.peak = live.bytes
        live.where = where
        after = step()
    return Peak(after, live.peak, kept, live.at_peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(EVERY))
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["bf16", "fp16"])
    parser.add_argument("--full", action="store_true", help="nets at their published size")
    parser.add_argument("--batch", type=int, help="default: the suite's large batch on a CPU, 2 with --full")
    parser.add_argument("--where", action="store_true", help="list what lives at the peak")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    table = Table(title="Peak MB of a training step above weights, optimizer and inputs", title_justify="left")
    for column in ("net", "dtype", *(f"{way}: {part}" for way in WAYS for part in ("backward", "step")), "ours / autocast", "ours / O2"):
        table.add_column(column, justify="left" if column in ("net", "dtype") else "right")
    for name in options.only:
        batch = options.batch or (2 if options.full else max(EVERY[name].large // 4, 2))
        for dtype in options.dtypes:
            torch.manual_seed(0)
            model, feed = EVERY[name].make(options.full, batch)
            found: dict[str, Peak] = {}
            for way in WAYS:
                with suppress(RuntimeError):  # what a CPU cannot run wholly in half has no figure
                    found[way] = peak(model.train(), feed, way, dtype, options.where, not options.full)
                torch._dynamo.reset()
            cells = [f"{size / 1e6:.2f}" for way in WAYS for size in _sizes(found.get(way))]
            ratios = [f"{found['ours'].backward / found[way].backward:.3f}" if way in found else "" for way in ("autocast", "o2")]
            table.add_row(name, dtype, *cells, *ratios)
            print(name, dtype, *cells, *ratios, flush=True)
            if options.where:
                _show(found)
    console().print(table)


def _sizes(found: Peak | None) -> tuple[float, float]:
    return (found.backward, found.step) if found else (float("nan"), float("nan"))


def _show(found: dict[str, Peak]) -> None:
    for what in sorted(set().union(*(each.at for each in found.values())), key=lambda w: -max(each.at[w] for each in found.values())):
        sizes = [each.at[what] for each in found.values()]
        if max(sizes) and len(set(sizes)) > 1:
            print(f"  {what}: " + ", ".join(f"{way} {size}" for way, size in zip(found, sizes, strict=True)))


if __name__ == "__main__":
    main()
