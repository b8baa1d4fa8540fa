"""What fp8 products are worth on a GPU beside bf16: seconds and memory of a step, and whether the plan knew.

    python examples/benchmarks/fp8.py --json fp8.json [--minutes 1.5]    # on a CUDA device with fp8 units
    python examples/benchmarks/fp8.py --small                            # tiny, eager, emulated: shows that it runs

In this order, as far as the time goes:

    layer    a decoder layer of width 4,096, ffn 16,384, 2,048 positions, batch 8, eager and through inductor
    bert     twelve layers of BERT-base's widths; a plan that finds nothing to gain is the bf16 plan
    shapes   single products of 8,192 rows, eager: does the clock agree with the plan? Within 2 % both answers are right
    llama    layers of a Llama of 1 billion parameters, through inductor and eager

A step is forward and backward. Times are medians of rounds that take turns. Memory is the peak of a step and the weights. "kernels" are the
fp8 products that a profile of a step holds, beside those of the plan: if they differ the exit status is 1, as it is for a result that is
far from bf16's. Each bar is printed beside its figure, met or missed.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import amprewrite

ANY_PRICE = {"preset": "fp8", "module:*": "fp8"}
TIE = 0.02
"""Two times that differ by less are the same."""
FAR = 0.15
"""No result in fp8 is further from that in bf16, as a share."""


class Layer(nn.Module):
    """A decoder layer: causal attention and a gated feed-forward part, under norms."""

    def __init__(self, width: int, ffn: int, heads: int, pairs: int, gated: bool) -> None:
        super().__init__()
        self.shape, self.grouped = (-1, width // heads), pairs != heads
        kept = pairs * width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, columns, bias=False) for columns in (width, kept, kept, width))
        self.gate = nn.Linear(width, ffn, bias=False) if gated else None
        self.up, self.down = nn.Linear(width, ffn, bias=False), nn.Linear(ffn, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm_1(x)
        q, k, v = (part(h).unflatten(-1, self.shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(F.gelu(self.up(h)) if self.gate is None else F.silu(self.gate(h)) * self.up(h))


def layers(count: int, width: int, ffn: int, heads: int, pairs: int, gated: bool = True) -> nn.Module:
    return nn.Sequential(*(Layer(width, ffn, heads, pairs, gated) for _ in range(count)))


@dataclass
class Row:
    """One comparison with bf16."""

    what: str
    backend: str
    bf16_ms: float = 0.0
    faster: float = 1.0
    """Times faster than bf16; 1 where the plan finds nothing to gain."""
    memory: float = 1.0
    """Peak, as a share of bf16's."""
    planned: int = 0
    """Products that the plan runs in fp8; in a graph for training each of the three is one."""
    kernels: int = 0
    """Products that a profile shows in fp8."""
    error: float = 0.0
    pays: bool = True
    """Whether the plan finds something to gain."""
    bar: str = ""
    note: str = ""

    @property
    def wrong(self) -> str:
        """What is wrong with it, whatever the speed is."""
        if self.error > FAR:
            return f"its result is {self.error:.2f} off bf16's"
        return f"{self.kernels} fp8 kernels for {self.planned} products" if self.kernels != self.planned and not self.note else ""


class Measure:
    """Steps of one net in bf16 and in fp8 on one device."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self.emulated = device != "cuda" or torch.cuda.get_device_capability() < (8, 9)

    def row(self, what: str, net: nn.Module, x: torch.Tensor, backend: str, bar: str = "") -> Row:
        """The comparison; the plan decides, but where there are no fp8 units, and where it finds nothing all products are in fp8."""
        row = Row(what, backend, bar=bar)
        products: Any = ANY_PRICE if self.emulated else "fp8"
        nets = {"bf16": amprewrite.rewrite(copy.deepcopy(net), dtype="bf16", backend=backend)}
        nets["fp8"] = amprewrite.rewrite(copy.deepcopy(net), dtype="bf16", products=products, backend=backend)
        try:
            result = nets["fp8"](x)
        except amprewrite.AmpRewriteError as error:
            if "runs none of" not in str(error):
                raise
            row.pays = False
            nets["fp8"] = amprewrite.rewrite(copy.deepcopy(net), dtype="bf16", products=ANY_PRICE, backend=backend)
            result = nets["fp8"](x)
        result = result.detach()
        with torch.no_grad():
            exact = nets["bf16"](x)
        row.error = float((result - exact).norm() / exact.norm())
        del result, exact
        steps = {name: stepper(each, x) for name, each in nets.items()}
        for step in steps.values():
            for _ in range(1 if self.emulated else 3):
                step()
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(self.rounds):
            for name, step in steps.items():
                taken[name].append(self.seconds(step))
        bf16, fp8 = (statistics.median(taken[name]) for name in ("bf16", "fp8"))
        row.bf16_ms, row.faster = 1e3 * bf16, bf16 / fp8
        peaks = {name: self.peak(nets[name], step) for name, step in steps.items()}
        row.memory = peaks["fp8"] / peaks["bf16"] if peaks["bf16"] else 1.0
        row.planned = sum(
            gemm.fp8 for region in nets["fp8"].plan.regions for product in region.quantised.products for gemm in product.gemms
        )
        row.kernels = self.fp8_kernels(steps["fp8"])
        if self.emulated:
            row.note = "emulated"
        return row

    def seconds(self, step: Callable[[], None]) -> float:
        self.wait()
        start = time.perf_counter()
        step()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak(self, net: nn.Module, step: Callable[[], None]) -> int:
        """Bytes of the weights, and what a step takes beside what is there: the other net is there, too."""
        if self.device != "cuda":
            return 0
        there = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - there + sum(p.nbytes for p in net.parameters())

    def fp8_kernels(self, step: Callable[[], None]) -> int:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            step()
            self.wait()
        return sum(event.count for event in seen.key_averages() if event.key == "aten::_scaled_mm")


def stepper(net: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        net(x).float().square().mean().backward()
        for parameter in net.parameters():
            parameter.grad = None

    return step


Make = Callable[[], tuple[nn.Module, torch.Tensor]]


def cases(small: bool, device: str) -> list[tuple[str, str, str, float, Make]]:
    """Name, back end, bar, seconds that it needs about, and what makes net and batch."""

    def case(net: Callable[[], nn.Module], *shape: int) -> Make:
        return lambda: (net().to(device), torch.randn(*shape, device=device))

    if small:
        shapes = [(32, 48, 64), (1, 32, 48)]
        return [
            ("layer", "eager", "", 0, case(lambda: layers(1, 64, 128, 4, 4, gated=False), 2, 16, 64)),
            ("bert", "eager", "", 0, case(lambda: layers(2, 64, 128, 4, 4, gated=False), 2, 16, 64)),
            *((f"shape {m} x {k} x {n}", "eager", "", 0, case(lambda k=k, n=n: product(k, n), m, k)) for m, k, n in shapes),
            ("llama", "eager", "", 0, case(lambda: layers(2, 64, 176, 4, 2), 2, 16, 64)),
        ]
    layer = case(lambda: layers(1, 4096, 16384, 32, 32, gated=False), 8, 2048, 4096)
    llama = case(lambda: layers(4, 2048, 8192, 32, 8), 4, 2048, 2048)
    sides = (512, 1024, 2048, 4096, 8192)
    return [
        ("layer", "eager", ">= 1.25", 8, layer),
        ("layer", "inductor", ">= 1.45, memory <= 0.85", 15, layer),
        ("bert", "eager", ">= 1", 6, case(lambda: layers(12, 768, 3072, 12, 12, gated=False), 32, 128, 768)),
        *(
            (f"shape 8192 x {k} x {n}", "eager", "sign", 2, case(lambda k=k, n=n: product(k, n), 8192, k))
            for k in sides for n in sides
        ),
        ("llama", "inductor", ">= 1.12", 15, llama),
        ("llama", "eager", "", 5, llama),
    ]  # fmt: skip


def product(inner: int, columns: int) -> nn.Module:
    """A product of which both gradients are taken, because a weight precedes it. GELU reads its result: logits would stay bf16."""
    return nn.Sequential(nn.RMSNorm(inner), nn.Linear(inner, columns, bias=False), nn.GELU())


def judged(row: Row) -> str:
    """What a figure says to its bar. A plan that finds nothing to gain is the bf16 plan, whatever fp8 would have been."""
    if row.note or not row.bar:
        return row.note
    if row.bar == "sign":
        right = abs(row.faster - 1) <= TIE or (row.faster > 1) == row.pays
        return f"{'right' if right else 'wrong'}: the plan says {'fp8' if row.pays else 'bf16'}"
    if not row.pays:
        return f"bf16 plan: {'met' if row.bar == '>= 1' else 'missed'}"
    speed, _, memory = row.bar.partition(", memory <= ")
    met = row.faster >= float(speed.removeprefix(">= ")) - TIE * (speed == ">= 1") and (not memory or row.memory <= float(memory))
    return f"{row.bar}: {'met' if met else 'missed'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny nets, eager, one round; emulated where there are no fp8 units")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="cases whose name begins so")
    asked = parser.parse_args()
    device, ends = "cuda" if torch.cuda.is_available() else "cpu", time.monotonic() + 60 * asked.minutes
    measure = Measure(device, 1 if asked.small else asked.rounds)
    if measure.emulated and not asked.small:
        raise SystemExit("the benchmark wants a GPU that multiplies fp8 (sm_89 or later); --small shows elsewhere that it runs")
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}\n")
    print("| case | back end | bf16, ms | fp8: times faster | peak memory | fp8 kernels | planned | bar |")
    print("| --- | --- | --: | --: | --: | --: | --: | --- |")
    rows: list[Row] = []
    for name, backend, bar, needs, make in cases(asked.small, device):
        if not name.startswith(asked.only):
            continue
        if ends - time.monotonic() < needs:
            print(f"| {name} | {backend} | left out: no time | | | | | |")
            continue
        torch.manual_seed(0)
        row = measure.row(name, *make(), backend, bar)
        rows.append(row)
        figures = f"{row.bf16_ms:.2f} | {row.faster:.2f} | {row.memory:.2f} | {row.kernels} | {row.planned}"
        print(f"| {name} | {backend} | {figures} | {judged(row)} |", flush=True)
        if asked.json:
            asked.json.write_text(json.dumps([asdict(each) | {"judged": judged(each)} for each in rows], indent=1))
    signs = [judged(row).startswith("right") for row in rows if row.bar == "sign"]
    wrong = [f"{row.what}, {row.backend}: {row.wrong}" for row in rows if row.wrong]
    print(f"\nsigns right: {sum(signs)} of {len(signs)}; wrong: {'; '.join(wrong) or 'nothing'}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
