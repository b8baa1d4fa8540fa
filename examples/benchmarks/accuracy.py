"""Accuracy on demand against torch.autocast, and what calibration denies and saves in fp16, on real architectures of small width.

    python examples/benchmarks/accuracy.py [--dtype bf16] [--layers 12] [--only bert,vit] [--batches 4]

Activation casts are `aten._to_copy` between floating dtypes of what is no parameter, executed by one forward pass without
gradients. Errors are strict: fp32 arithmetic, rounded wherever a plan says low. torch.autocast's casts are those of its own
run, its error that of its rules for this device.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
import warnings
from typing import Any

import torch
from casts_vs_autocast import CASES
from torch.utils._python_dispatch import TorchDispatchMode

import amprewrite
from amprewrite.accuracy.frontier import search
from amprewrite.runtime.options import Options
from amprewrite.tables.formats import parse_format
from amprewrite.tables.vocabulary import Reason


class ActivationCasts(TorchDispatchMode):
    """Counts copies from one floating dtype to another, but for those of parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.parameters = {p.data_ptr() for p in model.parameters()}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("dtype")
        if func._overloadpacket is torch.ops.aten._to_copy and to is not None and to.is_floating_point:
            changes = args[0].is_floating_point() and args[0].dtype != to
            self.count += changes and args[0].data_ptr() not in self.parameters
        return func(*args, **kwargs)


def batches_of(inputs: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Batches like the first, with other tokens or pixels; no labels: losses run in fp32 either way."""

    def other(name: str, value: Any) -> Any:
        if name in ("input_ids", "decoder_input_ids"):
            return torch.randint(1, 200, value.shape)
        return torch.randn_like(value) if name == "pixel_values" else value

    plain = {name: value for name, value in inputs.items() if name != "labels"}
    return [{name: other(name, value) for name, value in plain.items()} for _ in range(count)]


def executed(model: torch.nn.Module, run: Any) -> int:
    with torch.no_grad():
        run()
        with ActivationCasts(model) as casts:
            run()
    return casts.count


def as_accurate_as_autocast(asked: argparse.Namespace) -> None:
    low = parse_format(asked.dtype)
    print(f"as accurate as torch.autocast ({asked.dtype}, {asked.layers} layers, {asked.batches} batches, CPU rules)\n")
    print("| model | autocast casts | ours | ratio | autocast error | ours | ratio | plans tried | seconds |")
    print("| --- | --: | --: | --: | --: | --: | --: | --: | --: |")
    for name in asked.only.split(","):
        torch.manual_seed(0)
        model, inputs = CASES[name](asked.layers)
        model.eval()
        if name == "t5":
            inputs["decoder_input_ids"] = inputs["labels"]
        data = batches_of(inputs, asked.batches)

        def theirs(model: Any = model, batch: Any = data[0]) -> Any:
            with torch.autocast("cpu", low.dtype):
                return model(**batch)

        casts = executed(model, theirs)
        started = time.perf_counter()
        found = search(model, data, Options(low), accuracy="autocast")
        seconds = time.perf_counter() - started
        amp = amprewrite.rewrite(model, dtype=asked.dtype, accuracy="autocast", calibration=data)
        ours = executed(model, lambda amp=amp, batch=data[0]: amp(**batch))
        rules = next(each.error for each in found.candidates if each.name == "torch.autocast's rules")
        print(
            f"| {name} | {casts} | {ours} | {ours / max(casts, 1):.2f} | {rules:.3e} | {found.chosen.error:.3e} | "
            f"{found.chosen.error / rules:.2f} | {found.evaluations} of {found.plans} | {seconds:.0f} |",
            flush=True,
        )


def calibrated(asked: argparse.Namespace) -> None:
    print("\nfp16 with calibration: ops kept high for their range, and memory that calibration takes\n")
    print("| model | ops | denied | peak, 1 batch | 100 batches |")
    print("| --- | --: | --: | --: | --: |")
    for name in asked.only.split(","):
        torch.manual_seed(0)
        model, inputs = CASES[name](2)
        model.eval()
        if name == "t5":
            inputs["decoder_input_ids"] = inputs["labels"]

        def peak(count: int, model: Any = model, inputs: Any = inputs) -> tuple[int, amprewrite.Calibration]:
            tracemalloc.start()
            found = amprewrite.calibrate(model, (batches_of(inputs, 1)[0] for _ in range(count)), progress=False)
            used = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return used, found

        peak(1)
        (one, _), (many, found) = peak(1), peak(100)
        amp = amprewrite.rewrite(model, dtype="fp16", calibration=found)
        with torch.no_grad():
            amp(**batches_of(inputs, 1)[0])
        ops = [node for node in amp.plan.nodes if node.role == "op" and node.dtype]
        denied = sum(node.reason is Reason.OUT_OF_RANGE for node in ops)
        print(f"| {name} | {len(ops)} | {denied} | {one / 1e6:.1f} MB | {many / 1e6:.1f} MB |", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--dtype", default="bf16", choices=["bf16", "fp16"])
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--batches", type=int, default=4)
    options.add_argument("--only", default="bert,gpt2,llama,vit,t5")
    asked = options.parse_args()
    warnings.simplefilter("ignore")
    as_accurate_as_autocast(asked)
    calibrated(asked)


if __name__ == "__main__":
    main()
