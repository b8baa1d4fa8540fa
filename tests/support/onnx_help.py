"""ONNX models for tests: graphs made by hand, small nets exported from PyTorch, and what is asked of all of them."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from amprewrite.api.onnx.job import OnnxResult
from amprewrite.graphs.log_quiet import Quiet
from amprewrite.graphs.onnx.run.compare import relative_error, strict_outputs
from amprewrite.graphs.onnx.run.onnx_runtime import session

F32, F16, BF16, I64, BOOL = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT64, TensorProto.BOOL
node = helper.make_node
graph = helper.make_graph
ORT = tuple(map(int, onnxruntime.__version__.split(".")[:2]))


def differs_before_ort_1_27(why: str) -> pytest.MarkDecorator:
    """Expect a test to fail with ONNX Runtime before 1.27; `why` says what that does."""
    return pytest.mark.xfail(ORT < (1, 27), reason=f"ONNX Runtime before 1.27: {why}", strict=False)


ONE_PASS = "its fp32 LayerNormalization takes the variance in one pass, and loses it beside an offset"


@dataclass
class Net:
    model: onnx.ModelProto
    feed: dict[str, np.ndarray]


def value(name: str, *shape: int | str, dtype: int = F32) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, list(shape))


def weight(name: str, *shape: int, scale: float | None = None) -> onnx.TensorProto:
    values = np.random.default_rng(sum(map(ord, name))).standard_normal(shape)
    return numpy_helper.from_array((values * (scale or shape[0] ** -0.5)).astype(np.float32), name)


def const(name: str, value: Any, dtype: Any = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(value, dtype), name)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def net(nodes, ins, outs, inits, feed, opset: int = 18, functions=(), domains=()) -> Net:
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    whole = graph(nodes, "net", ins, outs, inits)
    made = helper.make_model(whole, opset_imports=opsets, ir_version=10, functions=list(functions))
    return Net(made if domains else onnx.shape_inference.infer_shapes(made), feed)


def gemm_chain(*between: onnx.NodeProto, inits=(), result: str = "mid", opset: int = 18) -> Net:
    """x → Gemm → `between`, which reads "h" and gives `result` → Gemm → out."""
    nodes = [node("Gemm", ["x", "w0"], ["h"], name="first"), *between, node("Gemm", [result, "w1"], ["out"], name="last")]
    held = [weight("w0", 16, 16), weight("w1", 16, 16), *inits]
    return net(nodes, [value("x", 4, 16)], [value("out", 4, 16)], held, {"x": noise(4, 16)}, opset)


# -- nets by hand -------------------------------------------------------------------
def _branch(name: str, act: str) -> onnx.GraphProto:
    nodes = [
        node("Gemm", ["h", f"w_{name}"], [f"g_{name}"], name=f"gemm_{name}"),
        node(act, [f"g_{name}"], [f"o_{name}"], name=f"act_{name}"),
    ]
    return graph(nodes, name, [], [value(f"o_{name}", 4, 16)], [weight(f"w_{name}", 16, 16)])


def cond_if() -> Net:
    return gemm_chain(
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Greater", ["s", "zero"], ["c"]),
        node("If", ["c"], ["mid"], name="if", then_branch=_branch("then", "Relu"), else_branch=_branch("else", "Tanh")),
        inits=[const("zero", 0)],
    )


def loop() -> Net:
    body = graph(
        [node("MatMul", ["state", "wl"], ["m"], name="mm"), node("Tanh", ["m"], ["next"]), node("Identity", ["c_in"], ["c_out"])],
        "body",
        [value("i", dtype=I64), value("c_in", dtype=BOOL), value("state", 4, 16)],
        [value("c_out", dtype=BOOL), value("next", 4, 16)],
    )
    inits = [weight("wl", 16, 16), const("n", 3, np.int64), const("yes", True, np.bool_)]
    return gemm_chain(node("Loop", ["n", "yes", "h"], ["mid"], name="loop", body=body), inits=inits)


def scan() -> Net:
    body = graph(
        [
            node("MatMul", ["xt", "wi"], ["a"], name="mm_in"),
            node("MatMul", ["hs", "wh"], ["b"], name="mm_state"),
            node("Add", ["a", "b"], ["ab"]),
            node("Tanh", ["ab"], ["hn"]),
            node("Identity", ["hn"], ["ho"]),
        ],
        "body",
        [value("hs", 4, 16), value("xt", 4, 16)],
        [value("hn", 4, 16), value("ho", 4, 16)],
    )
    nodes = [
        node("Scan", ["init", "seq"], ["last", "ys"], name="scan", num_scan_inputs=1, body=body),
        node("MatMul", ["last", "wo"], ["out"], name="mm_out"),
    ]
    inits = [weight("wi", 16, 16), weight("wh", 16, 16), weight("wo", 16, 16), const("init", np.zeros((4, 16)))]
    return net(nodes, [value("seq", 5, 4, 16)], [value("out", 4, 16)], inits, {"seq": noise(5, 4, 16)})


def overflow() -> Net:
    nodes = [
        node("Gemm", ["x", "w0"], ["h0"], name="g0"),
        node("Gemm", ["h0", "w1"], ["h1"], name="g1"),
        node("Mul", ["h1", "k"], ["big"], name="grow"),
        node("Gemm", ["big", "w2"], ["h2"], name="g2"),
        node("Mul", ["h2", "ik"], ["small"], name="shrink"),
        node("Gemm", ["small", "w3"], ["h3"], name="g3"),
        node("LayerNormalization", ["h3", "s"], ["ln"]),
        node("Gemm", ["ln", "w4"], ["out"], name="g4"),
    ]
    inits = [*(weight(f"w{i}", 16, 16) for i in range(5)), const("k", 6e4), const("ik", 1 / 6e4), const("s", np.ones(16))]
    return net(nodes, [value("x", 4, 16)], [value("out", 4, 16)], inits, {"x": noise(4, 16)})


def underflow() -> Net:
    nodes = [
        node("Gemm", ["x", "w0"], ["h0"], name="tiny"),
        node("Mul", ["h0", "k"], ["u"], name="scale"),
        node("Mul", ["u", "u"], ["sq"]),
        node("ReduceMean", ["sq", "axis"], ["v"]),
        node("Add", ["v", "eps"], ["ve"], name="add_eps"),
        node("Sqrt", ["ve"], ["sd"]),
        node("Div", ["u", "sd"], ["normed"]),
        node("Gemm", ["normed", "w1"], ["out"], name="last"),
    ]
    scales = [const("k", 3e8), const("eps", 1e-12), const("axis", [-1], np.int64)]
    inits = [weight("w0", 16, 16, scale=1e-9), *scales, weight("w1", 16, 16)]
    return net(nodes, [value("x", 4, 16)], [value("out", 4, 16)], inits, {"x": noise(4, 16)})


def casts() -> Net:
    return gemm_chain(
        node("Cast", ["h"], ["h16"], to=F16),
        node("Relu", ["h16"], ["r16"]),
        node("Cast", ["r16"], ["r32"], to=F32),
        node("Cast", ["r32"], ["mid"], to=F32),
    )


def lstm() -> Net:
    nodes = [
        node("Gather", ["table", "ids"], ["e"]),
        node("LSTM", ["e", "w", "r", "b"], ["y", "yh", "yc"], name="lstm", hidden_size=16),
        node("Squeeze", ["yh", "axis"], ["hh"]),
        node("Gemm", ["hh", "w1"], ["out"], name="last"),
    ]
    inits = [
        weight("table", 50, 16), weight("w", 1, 64, 16, scale=0.2), weight("r", 1, 64, 16, scale=0.2), weight("b", 1, 128),
        const("axis", [0], np.int64), weight("w1", 16, 8),
    ]  # fmt: skip
    ids = np.arange(20).reshape(5, 4)
    return net(nodes, [value("ids", 5, 4, dtype=I64)], [value("out", 4, 8)], inits, {"ids": ids})


def unet() -> Net:
    conv = {"pads": [1] * 4}
    nodes = [
        node("Conv", ["x", "c0"], ["a"], name="down", **conv),
        node("BatchNormalization", ["a", "g", "b", "m", "v"], ["an"]),
        node("Relu", ["an"], ["ar"]),
        node("MaxPool", ["ar"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["p", "c1"], ["q"], name="deep", **conv),
        node("Resize", ["q", "", "sizes"], ["u"], mode="nearest"),
        node("Concat", ["u", "ar"], ["both"], axis=1),
        node("Conv", ["both", "c2"], ["out"], name="up", **conv),
    ]
    inits = [
        weight("c0", 8, 3, 3, 3, scale=0.2), weight("c1", 16, 8, 3, 3, scale=0.1), weight("c2", 2, 24, 3, 3, scale=0.1),
        const("g", np.ones(8)), const("b", np.zeros(8)), const("m", np.zeros(8)), const("v", np.ones(8)),
        const("sizes", [1, 1, 2, 2]),
    ]  # fmt: skip
    return net(nodes, [value("x", "n", 3, 16, 16)], [value("out", "n", 2, 16, 16)], inits, {"x": noise(1, 3, 16, 16)})


HAND = {f.__name__: f for f in (cond_if, loop, scan, overflow, underflow, casts, lstm, unet)}


# -- nets from PyTorch -----------------------------------------------------------------
def torch_nets() -> dict[str, tuple[torch.nn.Module, dict[str, torch.Tensor]]]:
    import transformers as t

    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    small = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
    ids = torch.randint(0, 256, (2, 10), generator=generator)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:] = 0
    image = torch.randn(1, 3, 32, 32, generator=generator)
    text, seen = {"input_ids": ids}, {"pixel_values": image}
    masked = {**text, "attention_mask": mask}
    tokens = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = t.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False, **tokens)
    t5 = t.T5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    swin = t.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[2], num_heads=[2], window_size=4)
    resnet = t.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
    whisper = t.WhisperConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64, max_source_positions=20, num_mel_bins=8
    )
    encoder = t.models.whisper.modeling_whisper.WhisperEncoder(whisper)
    return {
        "bert": (t.BertModel(t.BertConfig(vocab_size=256, max_position_embeddings=32, **small)), masked),
        "gpt2": (t.GPT2LMHeadModel(gpt2), text),
        "t5": (t.T5EncoderModel(t5), masked),
        "vit": (t.ViTModel(t.ViTConfig(image_size=32, patch_size=8, **small), add_pooling_layer=False), seen),
        "convnext": (t.ConvNextForImageClassification(t.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)), seen),
        "swin": (t.SwinForImageClassification(swin), seen),
        "resnet": (t.ResNetForImageClassification(resnet), seen),
        "whisper": (encoder, {"input_features": torch.randn(1, 8, 40, generator=generator)}),
    }


def export(module: torch.nn.Module, kwargs: dict[str, torch.Tensor]) -> Net:
    advice = Quiet(logging.getLogger("torch.onnx._internal.exporter._registration"))
    with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), advice:
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module.eval(), (), kwargs=kwargs, dynamo=True, verbose=False)
    assert program is not None
    return Net(program.model_proto, {name: tensor.numpy() for name, tensor in kwargs.items()})


# -- what is asked of all ------------------------------------------------------------------
def all_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    def walk(nodes):
        for each in nodes:
            yield each
            for attribute in each.attribute:
                yield from walk(attribute.g.node)

    return list(walk(model.graph.node))


def ops(model: onnx.ModelProto) -> Counter[str]:
    return Counter(each.op_type for each in all_nodes(model))


def run(model: onnx.ModelProto, feed: dict[str, np.ndarray], level: int | None = None) -> list[np.ndarray]:
    found: list[np.ndarray] = session(model, level).run(None, feed)
    return found


def colours(model: onnx.ModelProto) -> dict[str, str]:
    """Colour of each node, as written in the file."""
    return {each.name: prop.value for each in all_nodes(model) for prop in each.metadata_props if prop.key == "amprewrite.colour"}


def parsed(body: str, ins: str, outs: str, inits: dict[str, Any], feed: dict[str, np.ndarray], opset: int = 18, ir_version: int = 8) -> Net:
    """A net in onnx's text format, with its weights."""
    model = onnx.parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["": {opset}]> g ({ins}) => ({outs}) {{\n{body}\n}}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(held), name) for name, held in inits.items())
    return Net(model, feed)


def true_error(given: Net, result: OnnxResult) -> float:
    """Error of a rewritten net on its own feed, whatever samples it was rewritten with, under true rounding."""
    return relative_error([run(given.model, given.feed)], strict_outputs(result.ir_model, [given.feed]))
