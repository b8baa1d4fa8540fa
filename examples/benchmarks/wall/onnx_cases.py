"""onnx's own backend cases, each converted to fp16 or bf16: valid, loaded and right, or refused with a reason.

    python examples/benchmarks/wall/onnx_cases.py [--dtype fp16] [--out cases.jsonl] [--only conv,lstm] [--shard 0/4] [--html cases.html]

The cases are those of the installed `onnx` package: its node, simple, PyTorch and light network cases. Each is converted with its own
inputs as calibration. What is compared is what ONNX Runtime makes of the fp32 file and what the converted one gives with every low
result really rounded. A case without fp32 values, or whose fp32 file ONNX Runtime does not run, says so and counts for nothing.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from children import Row, chosen, follow, page, parser, run_cases, tally
from onnx.backend.test.loader import load_model_tests
from rich.console import Console
from rich.table import Table

import amprewrite
from amprewrite import AmpRewriteError
from amprewrite.graphs.onnx.run.compare import strict_outputs
from amprewrite.tables.formats import parse_format

KINDS = ("node", "simple", "real", "pytorch-converted", "pytorch-operator")
LIGHT = "real"
ROUNDINGS = 8
"""How many times the format's rounding error a result may be off, relative to the largest number in it: chains of roundings."""
LEFT_OUT = frozenset({"no fp32", "fp32 fails"})
GOOD = frozenset({"right", "random"}) | LEFT_OUT
SECONDS = 120.0
Feed = dict[str, Any]


@functools.cache
def cases() -> dict[str, Any]:
    """Every case under a name that says its kind."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return {f"{kind}/{case.name.removeprefix('test_')}": case for kind in KINDS for case in load_model_tests(kind=kind)}


def read_case(name: str) -> tuple[onnx.ModelProto, list[list[Any]]]:
    """The model of a case, and the inputs of each of its data sets."""
    case = cases()[name]
    if case.model is not None:
        return case.model, [[_plain(value) for value in inputs] for inputs, _ in case.data_sets]
    if case.url is not None:
        model = onnx.load(Path(onnx.__file__).parents[1] / case.url)
        return model, [[_dummy(value) for value in _inputs(model)]]
    folder = Path(case.model_dir)
    model = onnx.load(folder / "model.onnx")
    sets = sorted(folder.glob("test_data_set_*"))
    return model, [[_read(each / f"input_{index}.pb", value) for index, value in enumerate(_inputs(model))] for each in sets]


def _inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    held = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in held]


def _plain(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    if isinstance(value, np.generic):
        return np.asarray(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _read(path: Path, value: onnx.ValueInfoProto) -> Any:
    kind = value.type.WhichOneof("value")
    if kind == "sequence_type":
        return onnx.numpy_helper.to_list(onnx.SequenceProto.FromString(path.read_bytes()))
    if kind == "optional_type":
        return onnx.numpy_helper.to_optional(onnx.OptionalProto.FromString(path.read_bytes()))
    return onnx.numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes()))


def _dummy(value: onnx.ValueInfoProto) -> np.ndarray:
    """What onnx's own runner feeds the light networks."""
    shape = [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim]
    size = int(np.prod(shape))
    return (np.arange(size).reshape(shape) / size).astype(np.float32)


# -- one case ----------------------------------------------------------------------------
def convert(name: str, dtype: str) -> Row:
    """What becomes of one case."""
    warnings.simplefilter("ignore")
    model, sets = read_case(name)
    if not has_fp32(model):
        return {"outcome": "no fp32"}
    feeds = [{value.name: each for value, each in zip(_inputs(model), inputs, strict=False)} for inputs in sets]
    try:
        wanted, again = (run(model, feeds) for _ in range(2))
    except Exception as error:  # a file that ONNX Runtime does not run tells nothing about ours
        return {"outcome": "fp32 fails", "why": _line(error)}
    ops = sorted({node.op_type for node in model.graph.node})
    try:
        result = amprewrite.rewrite_onnx(model, dtype=dtype, calibration=feeds or None)
    except AmpRewriteError as error:
        return {"outcome": "refused", "why": _line(error), "ops": ops}
    except Exception as error:  # the outcome that must not be
        return {"outcome": "raw error", "why": f"{type(error).__name__}: {_line(error)}", "ops": ops}
    colours = [node.colour.value for region in result.plan.regions for node in region.nodes if node.role == "op"]
    found = {
        "ops": ops, "low": colours.count("low"), "of": len(colours), "casts": casts(result.model) - casts(model),
        "notes": [note for note in result.report.notes if "sample" in note or "opset" in note],
    }  # fmt: skip
    if worst(wanted, again) > 0:
        return {"outcome": "random", **found}
    found["types kept"] = borders(result.model) == borders(model)
    error = worst(wanted, strict_outputs(result.ir_model, feeds, limit=None)) if found["types kept"] else float("inf")
    limit = ROUNDINGS * parse_format(dtype).eps
    outcome = "right" if error <= limit else "wrong"
    return {"outcome": outcome, "error": error, **({"why": f"off by {error:.3g}"} if outcome == "wrong" else {}), **found}


def casts(model: onnx.ModelProto) -> int:
    """Cast nodes of a file: a conversion adds them for data alone, for it stores constants as they are read."""
    return sum(node.op_type == "Cast" for node in model.graph.node)


def borders(model: onnx.ModelProto) -> list[tuple[str, int]]:
    """Names and types of a file's inputs and results."""
    return [(value.name, value.type.tensor_type.elem_type) for value in (*_inputs(model), *model.graph.output)]


def has_fp32(model: onnx.ModelProto) -> bool:
    """Whether a float32 tensor is anywhere in the model: an input, a result or a constant."""
    try:
        whole = onnx.shape_inference.infer_shapes(model)
    except Exception:  # a model that shape inference refuses is judged by its borders
        whole = model
    values = (*whole.graph.input, *whole.graph.output, *whole.graph.value_info)
    return any(_holds_fp32(value.type) for value in values) or any(t.data_type == onnx.TensorProto.FLOAT for t in model.graph.initializer)


def _holds_fp32(kind: onnx.TypeProto) -> bool:
    which = kind.WhichOneof("value")
    if which in ("sequence_type", "optional_type"):
        return _holds_fp32(getattr(kind, which).elem_type)
    return which == "tensor_type" and kind.tensor_type.elem_type == onnx.TensorProto.FLOAT


def run(model: onnx.ModelProto, feeds: Sequence[Feed]) -> list[list[Any]]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [session.run(None, feed) for feed in feeds]


def worst(wanted: Any, got: Any) -> float:
    """The largest error of any result, relative to the largest number in it; infinite where anything else differs.

    Floats may be of any width: a run under strict rounding holds half precision in float32.
    """
    if isinstance(wanted, list | tuple):
        same = isinstance(got, list | tuple) and len(got) == len(wanted)
        return max((worst(want, have) for want, have in zip(wanted, got, strict=True)), default=0.0) if same else float("inf")
    if isinstance(wanted, dict):
        return worst(list(wanted.values()), list(got.values())) if list(wanted) == list(got) else float("inf")
    if wanted is None or got is None:
        return 0.0 if wanted is got else float("inf")
    want, have = np.asarray(wanted), np.asarray(got)
    if want.shape != have.shape or want.dtype.kind != have.dtype.kind:
        return float("inf")
    if want.dtype.kind != "f":
        return 0.0 if (want == have).all() else float("inf")
    left, right = want.astype(np.float64), have.astype(np.float64)
    plain = np.isfinite(left)
    if not np.array_equal(left[~plain], right[~plain], equal_nan=True) or not np.isfinite(right[plain]).all():
        return float("inf")
    size = np.abs(left[plain]).max(initial=0.0)
    return float(np.abs(left - right)[plain].max(initial=0.0) / (size or 1.0))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def main() -> None:
    options = parser(__doc__, SECONDS)
    options.add_argument("--dtype", default="fp16")
    asked = options.parse_args()
    amprewrite.rewrite_onnx(read_case("node/add")[0], dtype=asked.dtype)  # imports are made before any child is forked
    names = chosen(cases(), asked)
    rows = follow(run_cases(names, functools.partial(convert, dtype=asked.dtype), asked.out, asked.seconds), len(names), GOOD)
    counted = [row for row in rows if row["outcome"] not in LEFT_OUT]
    table = Table("kind", "cases", *tally(counted), title=f"onnx {onnx.__version__}'s cases in {asked.dtype}")
    for kind in KINDS:
        mine = [row for row in counted if row["name"].startswith(f"{kind}/")]
        table.add_row(kind, str(len(mine)), *(str(tally(mine).get(outcome, 0)) for outcome in tally(counted)))
    table.add_row("all", str(len(counted)), *map(str, tally(counted).values()))
    Console().print(table)
    light = [row for row in rows if row["name"].startswith(f"{LIGHT}/")]
    if light:
        Console().print("light networks, data casts: " + ", ".join(f"{row['name'][5:]} {row.get('casts', '-')}" for row in light))
    if asked.html:
        asked.html.write_text(page(f"onnx cases, {asked.dtype}", counted, ("name", "outcome", "error", "low", "of", "casts", "why")))


if __name__ == "__main__":
    main()
