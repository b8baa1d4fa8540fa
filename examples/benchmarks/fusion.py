"""What inductor makes of a rewritten network, beside what it makes of the same network under torch.autocast.

    python examples/benchmarks/fusion.py [--quick] [--only bert,gpt2] [--dtypes bf16,fp16] [--lone] [--json results.json]

Both go through inductor: `torch.compile(model)` called under autocast, and `amprewrite.rewrite(model, backend="inductor")`. The
figures are inductor's own, taken from its scheduler when it has fused what it will fuse:

    graphs, breaks     Dynamo's
    kernels            that inductor generates: scheduled nodes that are no call of a library
    library            calls of library kernels: matmuls, convolutions, attention
    nodes              before fusion
    lone casts         kernels that do nothing but change a dtype; `inside`: those that neither read a weight nor write a gradient
    bytes              that the generated kernels read and write at least, as inductor counts them; `all`: with library calls

Training is forward and backward, inference a forward without gradients in eval mode. In fp16 our graphs unscale the gradients;
autocast leaves that to GradScaler, whose pass over all of them is not counted here. On a CPU the C++ that inductor writes is not
built, for that would take most of the time and changes no count.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from nets import MORE, NETS, Made, console
from rich.progress import track
from rich.table import Table
from torch._dynamo.utils import counters
from torch._inductor import config, metrics
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, NopKernelSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V

import amprewrite

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ALL = NETS | MORE
COPIES = {"load", "store", "get_index", "index_expr", "output"}
"""What a kernel may do and still do nothing but change a dtype."""


@dataclass
class Facts:
    """What inductor made of one net, summed over its graphs."""

    graphs: int = 0
    breaks: int = 0
    compiled: int = 0
    """Graphs that reached inductor: AOTAutograd makes two of one, forward and backward."""
    nodes: int = 0
    kernels: int = 0
    library: int = 0
    lone: int = 0
    inside: int = 0
    bytes: int = 0
    all_bytes: int = 0


def is_cast(node: BaseSchedulerNode) -> bool:
    """Whether all that a generated kernel does is to change dtypes."""
    bodies = [part._body for part in node.get_nodes() if isinstance(part, SchedulerNode)]
    counts: Counter[str] = sum((Counter(body.op_counts) for body in bodies), Counter())
    return bool(bodies) and counts["to_dtype"] > 0 and not counts.keys() - COPIES - {"to_dtype"}


class Look:
    """Inductor's hook after fusion: counts, and changes nothing."""

    def __init__(self) -> None:
        self.facts = Facts()
        self.lone: list[str] = []

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        facts = self.facts
        facts.compiled += 1
        results = set(V.graph.get_output_names())
        for node in nodes:
            if isinstance(node, NopKernelSchedulerNode):
                continue
            size = node.get_read_write_buffers_sizes()
            facts.all_bytes += size
            if isinstance(node, ExternKernelSchedulerNode):
                facts.library += 1
                continue
            facts.kernels += 1
            facts.bytes += size
            if is_cast(node):
                read = {dep.name for dep in node.read_writes.reads} & set(V.graph.graph_input_names)
                written = {dep.name for dep in node.read_writes.writes} & results
                facts.lone += 1
                facts.inside += not (read or written)
                self.lone.append(f"{'reads ' if read else ''}{'writes ' if written else ''}{node.get_name()}: {origins(node)}")
        return nodes


def origins(node: BaseSchedulerNode) -> str:
    """The fx nodes that a kernel comes from."""
    found = {str(origin) for part in node.get_nodes() if part.node is not None for origin in part.node.get_origins()}
    return ", ".join(sorted(found))


def looked_at(net: Made, kind: str, dtype: torch.dtype, training: bool) -> Look:
    """Compile one net one way, run it once, and tell what inductor did."""
    torch._dynamo.reset()
    counters.clear()
    metrics.reset()
    model, inputs = copy.deepcopy(net[0]).train(training), net[1]
    device = next(iter(inputs.values())).device.type
    if kind == "ours":
        with torch.set_grad_enabled(training):  # decided beforehand: kernels that were not built give no results to watch
            plan = amprewrite.plan(model, (), inputs, dtype=dtype)
        run: Any = amprewrite.rewrite(model, plan=plan, backend="inductor")
        torch._dynamo.reset()
        counters.clear()
    else:
        run = torch.compile(model)
    look = Look()
    unbuilt = mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    with unbuilt, config.patch(_post_fusion_custom_pass=look, fx_graph_cache=False), torch.set_grad_enabled(training):
        with torch.autocast(device, dtype, enabled=kind == "autocast"):
            loss = run(**inputs)
        if training:
            loss.backward()
    look.facts.nodes = metrics.ir_nodes_pre_fusion
    look.facts.graphs, look.facts.breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return look


def measure(name: str, dtype: str, training: bool) -> dict[str, Any]:
    full = torch.cuda.is_available()
    torch.manual_seed(0)
    model, inputs = ALL[name].make(full, ALL[name].small if full else 2)
    if full:
        model, inputs = model.cuda(), {key: x.cuda() for key, x in inputs.items()}
    row: dict[str, Any] = {"net": name, "dtype": dtype, "training": training, "ways": {}, "lone casts": {}, "failed": {}}
    for kind in ("autocast", "ours"):
        try:
            look = looked_at((model, inputs), kind, DTYPES[dtype], training)
        except RuntimeError as error:  # PyTorch's own: an op without a kernel for this format here
            row["failed"][kind] = str(error).partition("\n")[0]
        else:
            row["ways"][kind], row["lone casts"][kind] = asdict(look.facts), look.lone
    return row


def table(rows: list[dict[str, Any]], training: bool) -> Table:
    what = "training step, forward and backward" if training else "inference"
    shown = Table(title=f"{what}: ours / autocast, both through inductor")
    for column in ("net", "dtype", "graphs", "breaks", "nodes", "kernels", "library", "lone casts", "inside", "bytes", "all bytes"):
        shown.add_column(column, justify="left" if column in ("net", "dtype") else "right")
    for row in rows:
        if row["failed"]:
            shown.add_row(row["net"], row["dtype"], *[f"{' and '.join(row['failed'])} failed"], *[""] * 8)
            continue
        ours, theirs = row["ways"]["ours"], row["ways"]["autocast"]
        keys = ("graphs", "breaks", "nodes", "kernels", "library", "lone", "inside")
        cells = [f"{ours[key]} / {theirs[key]}" for key in keys]
        cells += [f"{ours[key] / theirs[key]:.2f}" if theirs["compiled"] else "not compiled" for key in ("bytes", "all_bytes")]
        shown.add_row(row["net"], row["dtype"], *cells)
    both = [row["ways"] for row in rows if not row["failed"] and row["ways"]["autocast"]["compiled"]]
    if both:
        means = [
            f"{statistics.geometric_mean(ways['ours'][key] / ways['autocast'][key] for ways in both):.2f}"
            for key in ("kernels", "bytes", "all_bytes")
        ]
        shown.caption = "geometric mean of ours / autocast: {} of the kernels, {} of their bytes, {} of all bytes".format(*means)
    return shown


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="training in bf16 only")
    options.add_argument("--only", default=",".join(ALL))
    options.add_argument("--dtypes", help="default: bf16,fp16")
    options.add_argument("--lone", action="store_true", help="name the casts that stand alone in our graphs, and where they come from")
    options.add_argument("--json", type=Path, help="write all figures")
    asked = options.parse_args()
    unknown = sorted(set(asked.only.split(",")) - ALL.keys())
    if unknown:
        options.error(f"no such net: {', '.join(unknown)}; there are {', '.join(ALL)}")
    warnings.simplefilter("ignore")
    shown = console()
    dtypes = (asked.dtypes or ("bf16" if asked.quick else "bf16,fp16")).split(",")
    cases = [(t, dtype, n) for t in ((True,) if asked.quick else (True, False)) for dtype in dtypes for n in asked.only.split(",")]
    rows: list[dict[str, Any]] = []
    for training, dtype, name in track(cases, "compiling", console=shown, transient=True):
        rows.append(measure(name, dtype, training))
        if asked.json:
            asked.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    for training in (True, False):
        chosen = [row for row in rows if row["training"] == training]
        if chosen:
            shown.print(table(chosen, training))
    for row in rows:
        for kind, why in row["failed"].items():
            shown.print(f"{row['net']} {row['dtype']}, {kind}: {why}", highlight=False)
    for row in rows if asked.lone else ():
        for kind, lone in row["lone casts"].items():
            shown.print(f"[bold]{row['net']} {row['dtype']} {'training' if row['training'] else 'inference'}, {kind}")
            shown.print("\n".join(lone) or "none", highlight=False)


if __name__ == "__main__":
    main()
