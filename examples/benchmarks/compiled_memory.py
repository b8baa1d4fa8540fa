"""What a compiler gets of one training step: bytes that it saves for backward, ops and casts, torch.autocast's against ours.

    python examples/benchmarks/compiled_memory.py [--only bert,t5] [--dtype bf16] [--full] [--batch 4] [--where]

AOTAutograd traces a step and cuts it into forward and backward as it does for inductor, whose passes on the joint graph run first. Nothing
is compiled or run, so figures are exact, the same on every run, and need no GPU. Weights and inputs, which are there anyway, are left out.
Attention becomes the ops that PyTorch chooses on the device that is planned for.

An op is a node of the two graphs: a compiler fuses most of them. `--where` lists the saved values in which the two ways differ.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx
from rich.table import Table
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

import amprewrite
from amprewrite.tables.devices import named_device
from amprewrite.tables.formats import FORMATS

sys.path.insert(0, str(Path(__file__).parent))
from nets import MORE, NETS, console

EVERY = NETS | MORE
CASTS = ("prims.convert_element_type.default", "aten._to_copy.default")
PRODUCTS = ("aten.mm.default", "aten.bmm.default", "aten.addmm.default")
WIDE = ("fp32 products: autocast", "ours")
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@dataclass
class Step:
    """The graphs of one training step, added up."""

    ops: int = 0
    casts: int = 0
    wide_products: int = 0
    """Matrix products in fp32."""
    saved: Counter[str] = field(default_factory=Counter)
    """Bytes by dtype, shape and op."""

    @property
    def bytes(self) -> int:
        return self.saved.total()

    def partition(self, joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Cut a joint graph as for inductor, and add its two graphs."""
        joint_graph_passes(joint)
        both = min_cut_rematerialization_partition(joint, inputs, **(options | {"compiler": "inductor"}))
        for module in both:
            nodes = [node for node in module.graph.nodes if node.op == "call_function"]
            called = [str(node.target) for node in nodes]
            self.ops += len(called)
            self.casts += sum(name in CASTS for name in called)
            products = (node.meta["val"].dtype for node, name in zip(nodes, called, strict=True) if name in PRODUCTS)
            self.wide_products += sum(dtype == torch.float32 for dtype in products)
        (results,) = next(iter(both[0].graph.find_nodes(op="output"))).args
        for node in results[options["num_fwd_outputs"] :]:
            value = node.meta.get("val") if isinstance(node, torch.fx.Node) and node.op != "placeholder" else None
            if isinstance(value, Tensor):
                name = f"{node.target} {str(value.dtype).partition('.')[2]} {tuple(value.shape)}"
                self.saved[name] += value.numel() * value.element_size()
        return both


def blank(module: torch.fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
    """A compiler that compiles nothing: its graphs return zeros, because not every machine has the kernels of the device planned for."""
    (results,) = next(iter(module.graph.find_nodes(op="output"))).args
    values = [each.meta["val"] if isinstance(each, torch.fx.Node) else each for each in results]

    def run(given: list[Any]) -> Any:
        return [torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value for value in values]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextmanager
def attention_of(device: str) -> Iterator[None]:
    """Attention becomes the ops that PyTorch chooses on `device` (ATen/native/transformers/cuda/sdp_utils.cpp for a GPU)."""
    if named_device(device).type == "cuda":
        ATTENTION.py_kernels[DispatchKey.CompositeImplicitAutograd] = attend_on_a_gpu
    ATTENTION._dispatch_cache.clear()
    try:
        yield
    finally:
        ATTENTION.py_kernels.pop(DispatchKey.CompositeImplicitAutograd, None)
        ATTENTION._dispatch_cache.clear()


def attend_on_a_gpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, p: float = 0.0, causal: bool = False, **rest: Any) -> Any:
    """Flash attention takes no mask. The memory-efficient kernel takes masks whose rows are contiguous. Other calls are written out."""
    aten, scale = torch.ops.aten, rest.get("scale")
    if q.dim() != 4 or q.shape[-1] % 8 or (mask is not None and mask.stride(-1) != 1):
        return aten._scaled_dot_product_attention_math(q, k, v, mask, p, causal, **rest)[0]
    if mask is None and q.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(q, k, v, p, causal, scale=scale)[0]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    bias = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, p, causal, scale=scale)[0]


def step(model: nn.Module, feed: dict[str, Tensor], dtype: str, ours: bool, device: str) -> Step:
    """What AOTAutograd gets of a step of a copy of `model`."""
    found = Step()
    backend = aot_autograd(fw_compiler=blank, bw_compiler=blank, partition_fn=found.partition, decompositions=select_decomp_table())
    model = copy.deepcopy(model)
    run = amprewrite.rewrite(model, dtype=dtype, backend=backend, device=device) if ours else torch.compile(model, backend=backend)
    with attention_of(device):
        with torch.autocast("cpu", FORMATS[dtype].dtype, enabled=not ours):
            loss = run(**feed)
        loss.backward()
    torch._dynamo.reset()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[name for name in EVERY if name != "lstm"])
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--device", default="h100", help="the device to plan for")
    parser.add_argument("--full", action="store_true", help="nets at their published size")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--where", action="store_true", help="list saved values that differ")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    table = Table(title="What AOTAutograd gets of a training step", title_justify="left")
    for column in ("net", "saved MB: autocast", "ours", "ratio", "casts: autocast", "ours", "ops: autocast", "ours", *WIDE):
        table.add_column(column, justify="left" if column == "net" else "right")
    for name in options.only:
        torch.manual_seed(0)
        model, feed = EVERY[name].make(options.full, options.batch)
        auto, own = (step(model.train(), feed, options.dtype, ours, options.device) for ours in (False, True))
        counts = auto.casts, own.casts, auto.ops, own.ops, auto.wide_products, own.wide_products
        ratio = f"{own.bytes / auto.bytes:.3f}"
        cells = [f"{auto.bytes / 1e6:.2f}", f"{own.bytes / 1e6:.2f}", ratio, *map(str, counts)]
        table.add_row(name, *cells)
        print(name, *cells, flush=True)
        for value in sorted(auto.saved | own.saved, key=lambda each: -abs(auto.saved[each] - own.saved[each])) if options.where else ():
            if auto.saved[value] != own.saved[value]:
                print(f"  {value}: autocast {auto.saved[value]}, ours {own.saved[value]}")
    console().print(table)


if __name__ == "__main__":
    main()
