"""Networks converted to fp16 or bf16 ONNX files by each converter that is installed, timed in turns in ONNX Runtime.

    python examples/benchmarks/onnx_converters.py [--only bert,resnet] [--dtype bf16] [--rounds 20] [--json results.json]

Converters: amprewrite, NVIDIA ModelOpt's AutoCast, onnxconverter-common's and ONNX Runtime's float16. Each gets the same fp32 file
and what its documentation asks for; inputs and outputs stay fp32. ONNX Runtime runs on CUDA where its build has that, else on the CPU,
whose fp16 kernels are few: it computes in fp32 between casts, so times there say how many casts a file has, and little more.
`error` is relative L2 against the fp32 file on the same provider; `casts` are Cast nodes left in the file; `on CPU` counts the nodes that
run on the CPU. On CUDA that is a fall back: with one in a file of amprewrite that the fp32 file has not the script ends with status 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from nets import NETS, console
from rich.table import Table
from torch import Tensor, nn

import amprewrite


class Result(nn.Module):
    """A network of the suite without its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.inner: nn.Module = net.model if hasattr(net, "model") else net.net  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        logits: Tensor = out if isinstance(out, Tensor) else out.logits
        return logits


CASES = ("bert", "llama", "vit", "resnet", "convnext", "odd_mlp")
Feed = dict[str, np.ndarray]


def exported(name: str, full: bool, path: Path) -> Feed:
    """The fp32 file of a network, and one batch for it."""
    torch.manual_seed(0)
    net, inputs = NETS[name].make(full, NETS[name].small if full else 2)
    x = next(iter(inputs.values()))
    program = torch.onnx.export(Result(net).eval(), (x,), dynamo=True, verbose=False)
    assert program is not None
    program.save(str(path))
    return {onnx.load(str(path), load_external_data=False).graph.input[0].name: x.numpy()}


def by_amprewrite(path: Path, out: Path, feed: Feed, dtype: str) -> None:
    amprewrite.rewrite_onnx(path, out, dtype=dtype, calibration=[feed])


def by_ort(path: Path, out: Path, feed: Feed, dtype: str) -> None:
    only_fp16(dtype)
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(str(path)), keep_io_types=True), str(out))


def by_onnxconverter_common(path: Path, out: Path, feed: Feed, dtype: str) -> None:
    only_fp16(dtype)
    from onnxconverter_common import float16

    onnx.save(float16.convert_float_to_float16(onnx.load(str(path)), keep_io_types=True), str(out))


def by_modelopt(path: Path, out: Path, feed: Feed, dtype: str) -> None:
    from modelopt.onnx.autocast import convert_to_mixed_precision

    onnx.save(convert_to_mixed_precision(onnx_path=str(path), low_precision_type=dtype, keep_io_types=True), str(out))


def only_fp16(dtype: str) -> None:
    if dtype != "fp16":
        raise ValueError("it converts to fp16 alone")


CONVERTERS: dict[str, tuple[str, Callable[[Path, Path, Feed, str], None]]] = {
    "amprewrite": ("amprewrite", by_amprewrite),
    "ONNX Runtime float16": ("onnxruntime", by_ort),
    "onnxconverter-common": ("onnxconverter-common", by_onnxconverter_common),
    "ModelOpt AutoCast": ("nvidia-modelopt", by_modelopt),
}
"""Name to the distribution that has it, and how it is called."""


def installed(distribution: str) -> bool:
    names = (distribution, f"{distribution}-gpu") if distribution == "onnxruntime" else (distribution,)
    return distribution == "amprewrite" or any(found(name) for name in names)


def found(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def session(path: Path, profile: str = "") -> ort.InferenceSession:
    """The file in ONNX Runtime. `profile`: a prefix of the file that says what ran where."""
    providers = [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in ort.get_available_providers()]
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_profiling, options.profile_file_prefix = bool(profile), profile or "onnxruntime_profile_"
    return ort.InferenceSession(str(path), options, providers=providers)


def on_cpu(path: Path, feed: Feed) -> dict[str, int]:
    """The nodes of a file that run on the CPU: how many of each op type."""
    run = session(path, str(path.with_suffix(".profile")))
    run.run(None, feed)
    events = json.loads(Path(run.end_profiling()).read_text())
    nodes = {event["name"]: event["args"] for event in events if event.get("cat") == "Node" and "provider" in event["args"]}
    return dict(Counter(args["op_name"] for args in nodes.values() if args["provider"] == "CPUExecutionProvider"))


def measured(name: str, rounds: int, full: bool, folder: Path, dtype: str) -> list[dict[str, Any]]:
    """A row for each converter: milliseconds, ratio to fp32, error, casts, nodes on the CPU; or why it has none."""
    original = folder / f"{name}.onnx"
    feed = exported(name, full, original)
    runs, rows = {"fp32": session(original)}, [{"net": name, "converter": "fp32", **nodes_of(original, feed)}]
    for converter, (distribution, convert) in CONVERTERS.items():
        row: dict[str, Any] = {"net": name, "converter": converter}
        rows.append(row)
        if not installed(distribution):
            row["failed"] = f"not installed: pip install {distribution}"
            continue
        out = folder / f"{name}_{len(rows)}.onnx"
        try:
            convert(original, out, feed, dtype)
            runs[converter] = session(out)
        except Exception as error:  # a peer that cannot convert a network is a result, not a reason to stop
            row["failed"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        else:
            row |= nodes_of(out, feed)
    exact = np.asarray(runs["fp32"].run(None, feed)[0], np.float64)
    times: dict[str, list[float]] = {converter: [] for converter in runs}
    for turn in range(rounds + 2):
        for converter, run in runs.items() if turn % 2 == 0 else reversed(runs.items()):
            began = time.perf_counter()
            run.run(None, feed)
            if turn >= 2:
                times[converter].append(time.perf_counter() - began)
    for row in rows:
        if row["converter"] in runs:
            mine = times[row["converter"]]
            got = np.asarray(runs[row["converter"]].run(None, feed)[0], np.float64)
            row["ms"] = 1000 * statistics.median(mine)
            row["faster than fp32"] = statistics.median(a / b for a, b in zip(times["fp32"], mine, strict=True))
            row["error"] = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
    return rows


def nodes_of(path: Path, feed: Feed) -> dict[str, Any]:
    casts = sum(node.op_type == "Cast" for node in onnx.load(str(path), load_external_data=False).graph.node)
    return {"casts": casts, "on CPU": on_cpu(path, feed)}


def fallen_back(rows: list[dict[str, Any]]) -> list[str]:
    """The networks of which amprewrite's file has more nodes of an op type on the CPU than the fp32 file."""
    at = {(row["net"], row["converter"]): Counter(row["on CPU"]) for row in rows if "on CPU" in row}
    return [net for net, converter in at if converter == "amprewrite" and at[net, converter] - at[net, "fp32"]]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default=",".join(CASES))
    options.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16")
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--json", type=Path, help="write all figures")
    asked = options.parse_args()
    warnings.simplefilter("ignore")
    provider = "CUDA" if "CUDAExecutionProvider" in ort.get_available_providers() else "CPU"
    full = provider == "CUDA"
    shown = Table(
        "net", "converter", "ms", "times faster than fp32", "error", "casts", "on CPU",
        title=f"{asked.dtype} in ONNX Runtime {ort.__version__}, {provider}",
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.only.split(","):
            rows += measured(name, asked.rounds, full, Path(folder), asked.dtype)
    for row in rows:
        figures = (
            [row["failed"], "", ""] if "failed" in row else [f"{row['ms']:.2f}", f"{row['faster than fp32']:.2f}", f"{row['error']:.1e}"]
        )
        shown.add_row(row["net"], row["converter"], *figures, str(row.get("casts", "")), str(sum(row.get("on CPU", {}).values())))
    console().print(shown)
    if asked.json:
        asked.json.write_text(json.dumps({"onnxruntime": ort.__version__, "provider": provider, "rows": rows}, indent=1))
    fallen = fallen_back(rows)
    if provider == "CUDA" and fallen:
        raise SystemExit(f"nodes fall back to the CPU in {', '.join(fallen)}: see 'on CPU' in --json")


if __name__ == "__main__":
    main()
