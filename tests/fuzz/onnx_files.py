"""Random ONNX models, sound and damaged, each rewritten in a process of its own, which ONNX Runtime may end.

A sound model gives a file that passes the checker, runs, and agrees with the original; an AmpRewriteError is a finding there. A damaged
one gives such a file or an AmpRewriteError.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import amprewrite
from tests.fuzz.oracle import Problem, failure

F32, F16, BF16, I64, BOOL = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT64, TensorProto.BOOL
SHAPE = [2, 8]
SECONDS = 60
"""For one case, in a process that has imported everything."""
LONGEST = 1500
UNARY = [
    "Relu",
    "Neg",
    "Abs",
    "Tanh",
    "Sigmoid",
    "Erf",
    "Softplus",
    "LeakyRelu",
    "Elu",
    "Selu",
    "HardSigmoid",
    "HardSwish",
    "Softsign",
    "Floor",
    "Ceil",
    "Sin",
    "Cos",
    "Identity",
    "Softmax",
    "LogSoftmax",
    "Round",
    "Sign",
    "ThresholdedRelu",
    "Celu",
    "Mish",
    "Dropout",
]
BINARY = ["Add", "Sub", "Mul", "Max", "Min", "Mean", "Sum"]
SPECIAL = [
    "MatMul",
    "MatMul",
    "MatMul",
    "Gemm",
    "Exp",
    "Sqrt",
    "Log",
    "Reciprocal",
    "Div",
    "Pow",
    "Clip",
    "Where",
    "Transpose",
    "Reshape",
    "Concat",
    "Split",
    "Slice",
    "Gather",
    "Expand",
    "Tile",
    "Pad",
    "Cast",
    "CastLow",
    "ReduceMean",
    "ReduceSum",
    "ReduceMax",
    "ArgMax",
    "TopK",
    "CumSum",
    "Einsum",
    "Squeeze",
    "Flatten",
    "LayerNorm",
    "BatchNorm",
    "InstanceNorm",
    "PRelu",
    "Conv",
    "Constant",
    "Shape",
    "If",
    "Loop",
    "Scan",
    "Sequence",
    "SequenceLoop",
    "Function",
    "LSTM",
    "HalfWeight",
    "LoopHalf",
    "Shared",
    "Resize",
    "OneHot",
]
DAMAGES = (
    "bits",
    "bits",
    "cut",
    "type",
    "rename",
    "drop",
    "shape",
    "duplicate",
    "attribute",
    "opset",
    "initializer",
    "garbage",
    "domain",
    "outputs",
)


@dataclass(frozen=True)
class File:
    """One case: the ops of a chain, the damage done to it, and how it is rewritten."""

    seed: int
    ops: tuple[str, ...]
    damage: str
    low: str
    opset: int
    keep_io: bool = True
    shuffled: bool = False
    extra: str = ""
    """Another output: the input itself, a sequence, or one without a shape."""

    def tags(self) -> tuple[str, ...]:
        return tuple(
            each
            for each in (self.damage, self.low, f"opset {self.opset}", "unsorted" * self.shuffled, self.extra, *sorted(set(self.ops)))
            if each
        )


@dataclass
class Chain:
    """Nodes so far; every op takes the last value, of shape 2 by 8, and gives another of that shape."""

    case: File
    draws: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    held: list[onnx.TensorProto] = field(default_factory=list)
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    values: list[str] = field(default_factory=lambda: ["x"])
    count: int = 0

    def name(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def const(self, value: Any, dtype: Any = np.float32) -> str:
        name = self.name("c")
        self.held.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.const(self.draws.standard_normal(shape) * shape[0] ** -0.5)

    def put(self, op: str, inputs: list[str], outputs: int = 1, **attributes: Any) -> list[str]:
        names = [self.name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, **attributes))
        return names

    def one(self, op: str, *inputs: str, **attributes: Any) -> str:
        return self.put(op, list(inputs), **attributes)[0]


def _info(name: str, kind: int = F32, shape: Any = SHAPE) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _body(
    chain: Chain, name: str, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto], nodes: list[onnx.NodeProto]
) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, inputs, outputs)


def _add(chain: Chain, op: str) -> str:
    """Append one op; the name of its result."""
    x, opset = chain.values[-1], chain.case.opset
    other = chain.values[int(chain.draws.integers(len(chain.values)))]
    axes = (lambda *found: {"axes": list(found)}) if opset < 13 else None
    if op in UNARY:
        return chain.one(op, x, **({"axis": -1} if op in ("Softmax", "LogSoftmax") else {}))
    if op in BINARY:
        return chain.one(op, x, other)
    if op == "MatMul":
        return chain.one("MatMul", x, chain.weight(8, 8))
    if op == "Gemm":
        return chain.one("Gemm", x, chain.weight(8, 8), chain.weight(8), transB=1)
    if op == "Exp":
        return chain.one("Exp", chain.one("Tanh", x))
    if op in ("Sqrt", "Log", "Reciprocal"):
        return chain.one(op, chain.one("Add", chain.one("Abs", x), chain.const(1.0)))
    if op == "Div":
        return chain.one("Div", x, chain.one("Add", chain.one("Abs", other), chain.const(1.0)))
    if op == "Pow":
        return chain.one("Pow", chain.one("Tanh", x), chain.const(2.0))
    if op == "Clip":
        return chain.one("Clip", x, chain.const(-1.0), chain.const(1.0))
    if op == "Where":
        return chain.one("Where", chain.one("Greater", x, chain.const(0.0)), x, other)
    if op == "Transpose":
        return chain.one("Transpose", chain.one("Transpose", x, perm=[1, 0]), perm=[1, 0])
    if op == "Reshape":
        return chain.one("Reshape", chain.one("Reshape", x, chain.const([4, 4], np.int64)), chain.const([2, -1], np.int64))
    if op == "Concat":
        return chain.one(
            "Slice",
            chain.one("Concat", x, other, axis=1),
            chain.const([4], np.int64),
            chain.const([12], np.int64),
            chain.const([1], np.int64),
        )
    if op == "Split":
        parts = chain.put("Split", [x], 2, axis=1) if opset < 18 else chain.put("Split", [x], 2, axis=1, num_outputs=2)
        return chain.one("Concat", parts[1], parts[0], axis=1)
    if op == "Slice":
        return chain.one("Concat", x, chain.one("Slice", x, chain.const([1], np.int64), chain.const([2], np.int64)), axis=0) and chain.one(
            "Identity", x
        )
    if op == "Gather":
        return chain.one("Gather", x, chain.const([1, 0], np.int64), axis=0)
    if op == "Expand":
        return chain.one("Add", x, chain.one("Expand", chain.weight(1, 8), chain.const([2, 8], np.int64)))
    if op == "Tile":
        return chain.one("Add", x, chain.one("Tile", chain.weight(1, 8), chain.const([2, 1], np.int64)))
    if op == "Pad":
        return chain.one(
            "Slice",
            chain.one("Pad", x, chain.const([0, 1, 0, 1], np.int64)),
            chain.const([0], np.int64),
            chain.const([8], np.int64),
            chain.const([1], np.int64),
        )
    if op == "Cast":
        return chain.one("Add", x, chain.one("Cast", chain.one("Cast", x, to=I64), to=F32))
    if op == "CastLow":
        return chain.one("Cast", chain.one("Add", chain.one("Cast", x, to=F16), chain.const(0.5, np.float16)), to=F32)
    if op in ("ReduceMean", "ReduceMax"):
        reduced = chain.one(op, x, axes=[1], keepdims=1) if opset < 18 else chain.one(op, x, chain.const([1], np.int64), keepdims=1)
        return chain.one("Sub", x, reduced)
    if op == "ReduceSum":
        return chain.one(
            "Mul", x, chain.one("ReduceSum", x, keepdims=1, **axes(1)) if axes else chain.one("ReduceSum", x, chain.const([1], np.int64))
        )
    if op == "ArgMax":
        return chain.one("Add", x, chain.one("Cast", chain.one("ArgMax", x, axis=1), to=F32))
    if op == "TopK":
        top, _ = chain.put("TopK", [x, chain.const([1], np.int64)], 2, axis=1)
        return chain.one("Add", x, top)
    if op == "CumSum":
        return chain.one("CumSum", x, chain.const(1, np.int64))
    if op == "Einsum":
        return chain.one("Einsum", x, chain.weight(8, 8), equation="ij,jk->ik")
    if op == "Squeeze":
        wide = chain.one("Unsqueeze", x, **axes(0)) if axes else chain.one("Unsqueeze", x, chain.const([0], np.int64))
        return chain.one("Squeeze", wide, **axes(0)) if axes else chain.one("Squeeze", wide, chain.const([0], np.int64))
    if op == "Flatten":
        return chain.one("Flatten", x, axis=1)
    if op == "LayerNorm":
        return chain.one("LayerNormalization", x, chain.weight(8), chain.weight(8)) if opset >= 17 else chain.one("LpNormalization", x)
    if op == "BatchNorm":
        return chain.one("BatchNormalization", x, *(chain.const(np.full(8, each)) for each in (1.0, 0.1, 0.0, 1.0)))
    if op == "InstanceNorm":
        cube = chain.one("Reshape", x, chain.const([1, 2, 8], np.int64))
        return chain.one(
            "Reshape",
            chain.one("InstanceNormalization", cube, chain.const([1.0, 2.0]), chain.const([0.0, 1.0])),
            chain.const(SHAPE, np.int64),
        )
    if op == "PRelu":
        return chain.one("PRelu", x, chain.weight(8))
    if op == "Conv":
        cube = chain.one("Reshape", x, chain.const([1, 2, 8], np.int64))
        return chain.one(
            "Reshape", chain.one("Conv", cube, chain.weight(2, 2, 3), chain.weight(2), pads=[1, 1]), chain.const(SHAPE, np.int64)
        )
    if op == "Constant":
        made = chain.one("Constant", value=numpy_helper.from_array(chain.draws.standard_normal((8, 8)).astype(np.float32)))
        return chain.one("MatMul", x, made)
    if op == "Shape":
        return chain.one("Reshape", x, chain.one("Shape", other))
    if op == "If":
        condition = chain.one("Greater", chain.one("ReduceSum", x, keepdims=0), chain.const(0.0))
        yes, no, w = chain.name("yes"), chain.name("no"), chain.weight(8, 8)
        then = _body(chain, "then", [], [_info(yes)], [helper.make_node("MatMul", [x, w], [yes])])
        other_body = _body(chain, "else", [], [_info(no)], [helper.make_node("Tanh", [x], [no])])
        return chain.one("If", condition, then_branch=then, else_branch=other_body)
    if op in ("Loop", "LoopHalf"):
        i, c, s, keep, mid, out, w = (chain.name(each) for each in ("i", "c", "s", "k", "m", "o", "w"))
        w = chain.weight(8, 8)
        steps = [helper.make_node("MatMul", [s, w], [mid]), helper.make_node("Tanh", [mid], [out])]
        if op == "LoopHalf":
            half, h, back = chain.name("h"), chain.name("h"), chain.name("h")
            value = numpy_helper.from_array(np.float16(0.5))
            steps = [
                helper.make_node("Cast", [s], [half], to=F16),
                helper.make_node("Constant", [], [h], value=value),
                helper.make_node("Add", [half, h], [back]),
                helper.make_node("Cast", [back], [mid], to=F32),
                helper.make_node("Tanh", [mid], [out]),
            ]
        steps.append(helper.make_node("Identity", [c], [keep]))
        body = _body(chain, "body", [_info(i, I64, []), _info(c, BOOL, []), _info(s)], [_info(keep, BOOL, []), _info(out)], steps)
        return chain.one("Loop", chain.const(2, np.int64), chain.const(True, np.bool_), x, body=body)
    if op == "Scan":
        s, row, out, new = (chain.name(each) for each in ("s", "r", "o", "n"))
        steps = [helper.make_node("Add", [s, row], [new]), helper.make_node("Tanh", [new], [out])]
        body = _body(chain, "body", [_info(s, F32, [8]), _info(row, F32, [8])], [_info(new, F32, [8]), _info(out, F32, [8])], steps)
        return chain.put("Scan", [chain.weight(8), x], 2, body=body, num_scan_inputs=1)[1]
    if op == "Sequence":
        made = chain.one("SequenceConstruct", x, other)
        return chain.one("SequenceAt", made, chain.const(0, np.int64))
    if op == "SequenceLoop":
        made = chain.one("SequenceInsert", chain.one("SequenceConstruct", other), chain.one("Tanh", x))
        return chain.one("Slice", chain.one("ConcatFromSequence", made, axis=0), chain.const([1], np.int64), chain.const([3], np.int64))
    if op == "Function":
        inner = [helper.make_node("Tanh", ["a"], ["t"]), helper.make_node("MatMul", ["t", "b"], ["r"])]
        made = helper.make_function("local", "Block", ["a", "b"], ["r"], inner, [helper.make_opsetid("", opset)])
        if not chain.functions:
            chain.functions.append(made)
        return chain.one("Block", x, chain.weight(8, 8), domain="local")
    if op == "LSTM":
        cube = chain.one("Reshape", x, chain.const([2, 1, 8], np.int64))
        out = chain.one("LSTM", cube, chain.weight(1, 32, 8), chain.weight(1, 32, 8), hidden_size=8)
        return chain.one("Reshape", out, chain.const(SHAPE, np.int64))
    if op == "HalfWeight":
        return chain.one("MatMul", x, chain.one("Cast", chain.const(chain.draws.standard_normal((8, 8)) * 0.3, np.float16), to=F32))
    if op == "Shared":
        w = next((each.name for each in chain.held if list(each.dims) == [8, 8] and each.data_type == F32), None) or chain.weight(8, 8)
        return chain.one("MatMul", x, w)
    if op == "Resize":
        cube = chain.one("Reshape", x, chain.const([1, 1, 2, 8], np.int64))
        big = chain.one("Resize", cube, "", chain.const([1.0, 1.0, 2.0, 1.0]))
        return chain.one(
            "Slice", chain.one("Reshape", big, chain.const([4, 8], np.int64)), chain.const([0], np.int64), chain.const([2], np.int64)
        )
    hot = chain.one("OneHot", chain.one("ArgMax", x, axis=1, keepdims=0), chain.const(8, np.int64), chain.const([0.0, 1.0]))
    return chain.one("Mul", x, hot)


def build(case: File) -> bytes:
    """The file of a case, damage and all."""
    chain = Chain(case, np.random.default_rng(case.seed))
    for op in case.ops:
        chain.values.append(_add(chain, op))
    outputs = [_info(chain.values[-1])]
    if case.extra == "input":
        outputs.append(_info("x"))
    elif case.extra == "sequence":
        outputs.append(helper.make_tensor_sequence_value_info(chain.one("SequenceConstruct", chain.values[-1], "x"), F32, None))
    elif case.extra == "unshaped":
        outputs.append(helper.make_tensor_value_info(chain.one("Abs", chain.values[-1]), F32, None))
    nodes = list(chain.nodes)
    if case.shuffled:
        random.Random(case.seed).shuffle(nodes)
    opsets = [helper.make_opsetid("", case.opset)] + [helper.make_opsetid("local", 1)] * bool(chain.functions)
    graph = helper.make_graph(nodes, "g", [_info("x")], outputs, chain.held)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8 if case.opset < 19 else 10, functions=chain.functions)
    return _damaged(case, model)


def _damaged(case: File, model: onnx.ModelProto) -> bytes:
    choose = random.Random(case.seed + 1)
    graph = model.graph
    node = choose.choice(graph.node) if graph.node else None
    if case.damage == "type":
        choose.choice([*graph.input, *graph.output]).type.tensor_type.elem_type = choose.choice((F16, BF16, I64, BOOL, 0, 99))
    elif case.damage == "rename" and node is not None and node.input:
        node.input[choose.randrange(len(node.input))] = choose.choice(("nowhere", "", "x", graph.output[0].name))
    elif case.damage == "drop" and graph.node:
        del graph.node[choose.randrange(len(graph.node))]
    elif case.damage == "shape":
        del choose.choice([*graph.input, *graph.output]).type.tensor_type.shape.dim[:1]
    elif case.damage == "duplicate" and node is not None:
        graph.node.append(node)
    elif case.damage == "attribute" and node is not None:
        node.attribute.append(
            helper.make_attribute(
                choose.choice(("axis", "to", "perm", "nonsense", "equation")), choose.choice((99, -99, "a", [1, 2, 3], 0.5))
            )
        )
    elif case.damage == "opset":
        model.opset_import[0].version = choose.choice((0, 1, 6, 99, -1))
    elif case.damage == "initializer" and graph.initializer:
        held = choose.choice(graph.initializer)
        held.raw_data = held.raw_data[: len(held.raw_data) // 2]
    elif case.damage == "domain" and node is not None:
        node.domain = choose.choice(("com.nobody", "ai.onnx.ml", "com.microsoft"))
    elif case.damage == "outputs":
        del graph.output[:]
    data = bytearray(model.SerializeToString())
    if case.damage == "bits":
        for _ in range(choose.randint(1, 8)):
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    elif case.damage == "cut":
        del data[choose.randrange(len(data)) :]
    elif case.damage == "garbage":
        data = bytearray(choose.randbytes(choose.randint(0, 200)))
    return bytes(data)


def generate(seed: int) -> File:
    choose = random.Random(seed)
    ops = tuple(choose.choice(choose.choice((UNARY, BINARY, SPECIAL, SPECIAL))) for _ in range(choose.randint(1, 8)))
    damage = choose.choice(DAMAGES) if choose.random() < 0.45 else ""
    return File(
        seed, ops, damage, choose.choice(("fp16", "bf16")), choose.choice((11, 13, 13, 15, 17, 18, 20, 21)), choose.random() < 0.8,
        choose.random() < 0.08, choose.choice(("", "", "", "", "input", "sequence", "unshaped")),
    )  # fmt: skip


# -- in the other process -------------------------------------------------------------------------------------------------


def examine(case: File) -> Problem | None:
    """Rewrite the file of a case, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "model.onnx", Path(folder) / "mixed.onnx"
        source.write_bytes(build(case))
        feed = {"x": np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)}
        sound = case.damage == "" and _run(source, feed) is not None
        if case.damage == "" and not sound:
            return None
        in_order = Path(folder) / "in_order.onnx"
        in_order.write_bytes(build(replace(case, shuffled=False)))
        if sound and not _checked(in_order):
            return None
        try:
            made = amprewrite.rewrite_onnx(source, target, dtype=case.low, keep_io=case.keep_io)
        except amprewrite.AmpRewriteError as error:
            if len(str(error)) > LONGEST:
                return Problem("long", type(error).__name__, f"{len(str(error))} characters: {str(error)[:200]}")
            return Problem("refused", type(error).__name__, str(error)[:500]) if sound else None
        except Exception as error:
            return failure(error)
        return _judged(case, source, target, feed, sound or made.report.valid)


def _checked(path: Any) -> bool:
    try:
        onnx.checker.check_model(path, full_check=True)
    except Exception:
        return False
    return True


def _run(path: Any, feed: dict[str, np.ndarray]) -> list[Any] | None:
    """What a file gives; None if it does not run, or on and on: a damaged loop may count to any number."""
    options, how = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
    timer = threading.Timer(SECONDS / 6, setattr, (how, "terminate", True))
    timer.start()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        kinds = {each.name: each.type for each in session.get_inputs()}
        made = {
            name: value.astype(np.float16) if kinds.get(name) == "tensor(float16)" else value
            for name, value in feed.items()
            if name in kinds
        }
        found: list[Any] = session.run(None, made, how)
    except Exception:
        return None
    finally:
        timer.cancel()
    return found


def _judged(case: File, source: Any, target: Any, feed: dict[str, np.ndarray], valid: bool) -> Problem | None:
    """What was written must be `valid`, if it was made of a sound file or is said to be, run, and agree."""
    try:
        onnx.checker.check_model(target, full_check=True)
    except Exception as error:
        if valid:
            return Problem("invalid", type(error).__name__, str(error)[:500])
    if case.low == "bf16":
        return None  # ONNX Runtime has few bf16 kernels on a CPU
    want, got = _run(source, feed), _run(target, feed)
    if want is None:
        return None
    if got is None:
        return Problem("does not run", "in ONNX Runtime", "the original runs, the result does not")
    for index, (one, other) in enumerate(zip(want, got, strict=True)):
        pairs = zip(one, other, strict=True) if isinstance(one, list) else [(one, other)]
        for a, b in pairs:
            if not np.issubdtype(np.asarray(a).dtype, np.floating) or not np.isfinite(a).all():
                continue
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            if a.shape != b.shape or not np.isfinite(b).all() or np.linalg.norm(a - b) > 0.03 * np.linalg.norm(a) + 1e-3:
                steps = {"Floor", "Ceil", "Round", "ArgMax", "Cast", "OneHot", "Sign", "If", "ThresholdedRelu"}
                kind = "rounding" if steps & set(case.ops) and a.shape == b.shape else "differs"
                return Problem(kind, "result", f"output {index}: {a.flatten()[:4]} in fp32, {b.flatten()[:4]} in {case.low}")
    return None


def serve() -> None:
    """Say "ready"; then read cases from stdin, a line of JSON each, and answer each with a line."""
    warnings.simplefilter("ignore")
    print("ready", flush=True)
    for line in sys.stdin:
        data = json.loads(line)
        with contextlib.redirect_stdout(io.StringIO()):
            found = examine(File(**{**data, "ops": tuple(data["ops"])}))
        print(json.dumps(None if found is None else asdict(found)), flush=True)


# -- in this process ------------------------------------------------------------------------------------------------------


class Server:
    """The process that rewrites files; a new one after each that died or was too slow."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def ask(self, case: File) -> Problem | None:
        process = self.process
        if process is None or process.poll() is not None:
            command = [sys.executable, "-m", "tests.fuzz.onnx_files"]
            process = self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            assert process.stdout is not None
            process.stdout.readline()
        assert process.stdin is not None and process.stdout is not None
        begun = time.monotonic()
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(asdict(case)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            process.wait()
            if time.monotonic() - begun >= SECONDS:
                return Problem("slow", f"over {SECONDS} s", "the case was given up")
            return Problem("died", f"status {process.returncode}", "the process ended")
        data = json.loads(line)
        return None if data is None else Problem(**data)


SERVER = Server()


def check(case: File) -> Problem | None:
    return SERVER.ask(case)


def smaller(case: File) -> Iterator[File]:
    for index in range(len(case.ops) - 1, -1, -1):
        if len(case.ops) > 1:
            yield replace(case, ops=case.ops[:index] + case.ops[index + 1 :])
    if case.extra:
        yield replace(case, extra="")
    if case.shuffled:
        yield replace(case, shuffled=False)
    if not case.keep_io:
        yield replace(case, keep_io=True)
    if case.opset != 18:
        yield replace(case, opset=18)


def shown(case: File) -> str:
    return f"""from tests.fuzz.onnx_files import File, build, examine

case = {case!r}
print(examine(case))
open("model.onnx", "wb").write(build(case))
"""


if __name__ == "__main__":
    serve()
