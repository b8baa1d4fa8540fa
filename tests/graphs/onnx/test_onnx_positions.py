"""Angles of positions in files with a dynamic length: no length is less exact than a short one."""

from __future__ import annotations

import contextlib
import io
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx_help import Net, parsed, true_error
from rotary import ANGLES, Rotary
from torch import Tensor, nn

from amprewrite.api.onnx.convert import rewrite_onnx
from amprewrite.graphs.onnx.run.compare import strict_outputs

pytest.importorskip("onnxscript", reason="the onnx extra is not installed")

WIDTH = 64
SPELLINGS = {**ANGLES, "multiply": lambda f, p: p[..., None].float() * f}
"""torch exports no complex numbers."""


class Layer(nn.Module):
    """Attention beside a stream.

    Averages over more keys are smaller, and the largest of more scores is larger, so that attention alone, or a sharper one, shows more
    rounding at greater length, positions or not.
    """

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.attention = Rotary(SPELLINGS[spelling], WIDTH, heads=2, sharp=3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


def exported(model: nn.Module) -> onnx.ModelProto:
    """An fp32 file with a dynamic length."""
    rows = torch.export.Dim("rows", min=2, max=8192)
    with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model.eval(), (torch.randn(1, 100, WIDTH),), dynamo=True, verbose=False, dynamic_shapes={"x": {1: rows}}
        )
    assert program is not None
    return program.model_proto


def feed_of(length: int, draws: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": draws.standard_normal((1, length, WIDTH)).astype(np.float32)}


def errors(spelling: str, low: str, lengths: tuple[int, ...]) -> list[float]:
    """Errors under true rounding of one converted file at each length."""
    file = exported(Layer(spelling))
    made, draws = rewrite_onnx(file, dtype=low), np.random.default_rng(0)
    return [true_error(Net(file, feed_of(length, draws)), made) for length in lengths]


@pytest.mark.parametrize("spelling", ["matmul", "region", "einsum", "multiply"])  # the test of 4,096 has 1,024, and all spellings
def test_a_thousand_positions_are_as_exact_as_a_hundred(spelling: str) -> None:
    short, long = errors(spelling, "fp16", (128, 1024))
    assert long < 1.5 * short


@pytest.mark.long
@pytest.mark.parametrize("low", ["fp16", "bf16"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_four_thousand_positions_are_as_exact_as_a_hundred(spelling: str, low: str) -> None:
    short, *longer = errors(spelling, low, (128, 1024, 4096))
    assert max(longer) < 1.5 * short


ALIBI = """k = MatMul(x, W)
 kt = Transpose<perm=[0,2,1]>(k)
 s = MatMul(x, kt)
 f = Cast<to=1>(at)
 u = Unsqueeze(f, one)
 a = Mul(u, slope)
 t = Add(s, a)
 p = Softmax<axis=-1>(t)
 y = MatMul(p, k)"""


@pytest.mark.parametrize("low", ["fp16", "bf16"])
def test_positions_that_are_given_are_exact_however_small_those_of_the_samples_are(low: str) -> None:
    """ALiBi: made-up positions are all 1."""
    draws = np.random.default_rng(0)
    inits = {"W": draws.standard_normal((64, 64)) / 32, "slope": np.float32(0.5), "one": np.array([1])}
    inits["W"] = inits["W"].astype(np.float32)
    given = parsed(ALIBI, "float[b,n,64] x, int64[b,n] at", "float[b,n,64] y", inits, {})
    given.feed |= {"x": draws.standard_normal((1, 512, 64)).astype(np.float32), "at": np.arange(512)[None]}
    assert true_error(given, rewrite_onnx(given.model, dtype=low)) < (2e-3 if low == "fp16" else 1e-2)


class Counts(nn.Module):
    """A triangle of ones times a mask: positions, which fp16 holds up to 2048."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.tril(torch.ones(x.shape[-2], x.shape[-2])) @ (x[..., :1] > -99).float()
        return torch.cat([self.linear(x), places], -1)


def test_positions_that_a_product_of_masks_counts_are_exact() -> None:
    made = rewrite_onnx(exported(Counts()), dtype="fp16")
    ((written, *_),) = strict_outputs(made.ir_model, [feed_of(4097, np.random.default_rng(0))])
    assert np.array_equal(written[0, :, -1], np.arange(1, 4098))


MASKS = {
    "a part of a triangle": "n = Shape(x)\n ones = Expand(one, n)\n mask = Trilu <upper = 0> (ones)",
    "one-hot rows": "n = Shape(x)\n zeros = ConstantOfShape(n)\n at = ArgMax <axis = -1, keepdims = 1> (x)\n"
    "mask = ScatterElements <axis = 1> (zeros, at, updates)",
}


@pytest.mark.parametrize("mask", MASKS)
def test_the_sizes_and_indices_of_a_mask_are_no_counts(mask: str) -> None:
    inits = {"W": np.ones((64, 64), np.float32) / 3, "one": np.ones((1, 1), np.float32), "updates": np.ones((400, 1), np.float32)}
    feed = {"x": np.random.default_rng(0).standard_normal((400, 64)).astype(np.float32)}
    given = parsed(f"{MASKS[mask]}\n y = MatMul(mask, W)", "float[400,64] x", "float[400,64] y", inits, feed)
    assert [node.colour.value for node in rewrite_onnx(given.model, dtype="fp16").plan.nodes if node.flops] == ["low"]


def test_a_far_number_that_fills_a_tensor_is_a_count() -> None:
    model = "n = Shape(x)\n held = ConstantOfShape <value = float[1] {1001}> (n)\n y = MatMul(held, W)"
    given = parsed(model, "float[4,64] x", "float[4,64] y", {"W": np.ones((64, 64), np.float32) / 3}, {"x": np.ones((4, 64), np.float32)})
    assert [node.colour.value for node in rewrite_onnx(given.model, dtype="bf16").plan.nodes if node.flops] == ["high"]


def net(model: str, given: str, inits: dict[str, np.ndarray]) -> list[str]:
    """Colour of each product of a file, which is converted without a run."""
    held = parsed(model, given, "float[a,b] y", {"W": np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)} | inits, {})
    made = rewrite_onnx(held.model, dtype="bf16", verify=False)
    return [node.colour.value for node in made.plan.nodes if node.flops]


LEARNT = "p = MatMul(f, W)\n r = Relu(p)\n y = MatMul(r, W)"


def test_features_that_weights_make_of_bytes_and_positions_are_no_counts() -> None:
    assert net(f"f = Cast <to = 1> (x)\n {LEARNT}", "uint8[9,64] x", {}) == ["low", "low"]
    assert net(f"f = Cast <to = 1> (x)\n {LEARNT}", "int64[9,64] x", {}) == ["high", "low"]


SIZED = {
    "margin": ("m = Cast <to = 1> (x)\n f = Pad(m, to)\n y = MatMul(f, W)", [0, 0, 300, 32]),
    "resized": ("m = Cast <to = 1> (x)\n f = Resize <mode = \"nearest\"> (m, , , to)\n y = MatMul(f, W)", [320, 64]),
}


@pytest.mark.parametrize("case", SIZED)
def test_the_sizes_of_a_margin_are_no_counts(case: str) -> None:
    model, sizes = SIZED[case]
    assert net(model, "bool[32,32] x", {"to": np.array(sizes)}) == ["low"]


def test_a_column_of_positions_is_a_count() -> None:
    model = "r = Range(zero, end, one)\n s = Reshape(r, pairs)\n c = Gather <axis = 1> (s, at)\n u = Reshape(c, rows)\n y = MatMul(u, x)"
    inits = {"zero": np.float32(0), "end": np.float32(4096), "one": np.float32(1), "at": np.int64(0)}
    assert net(model, "float[64,64] x", inits | {"pairs": np.array([2048, 2]), "rows": np.array([32, 64])}) == ["high"]


UNSHAPED = {
    "a dynamic rank": ("f = Cast <to = 1> (n)\n p = Reshape(f, to)\n y = MatMul(p, F)", ["high"]),
    "an if": (
        """y = If(c) <then_branch = t () => (float[a,b] u) {
            f = Cast <to = 1> (n)
            p = Unsqueeze(f, one)
            r = MatMul(p, F)
            u = MatMul(x, W)
        }, else_branch = e () => (float[a,b] v) {
            f2 = Cast <to = 1> (n)
            p2 = Unsqueeze(f2, one)
            v = MatMul(p2, F)
        }>""", ["high", "low", "high"],
    ),
    "a loop": (
        """y = Loop(turns, c, x) <body = l (int64 i, bool d, float[64,64] s) => (bool d2, float[64,64] s2) {
            d2 = Identity(d)
            f = Cast <to = 1> (i)
            p = Unsqueeze(f, both)
            angles = MatMul(p, F)
            h = Add(s, angles)
            s2 = MatMul(h, W)
        }>""", ["high", "low"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSHAPED)
def test_positions_of_unknown_shape_are_counts(case: str) -> None:
    model, wanted = UNSHAPED[case]
    inits = {"F": np.full((1, 64), 0.3, np.float32), "one": np.array([1]), "both": np.array([0, 1]), "turns": np.int64(1000)}
    assert net(model, "float[64,64] x, int64[k] n, int64[r] to, bool c", inits) == wanted


def test_each_product_of_onnx_runtime_keeps_positions() -> None:
    node = onnx.helper.make_node("TransposeMatMul", ["f", "F"], ["y"], domain="com.microsoft", transA=1)
    inits = {"F": np.full((1, 64), 0.3, np.float32)}
    given = parsed("f = Cast <to = 1> (n)\n y = MatMul(f, F)", "int64[1,k] n", "float[k,64] y", inits, {})
    given.model.graph.node[1].CopyFrom(node)
    given.model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    made = rewrite_onnx(given.model, dtype="bf16", verify=False)
    assert [each.colour.value for each in made.plan.nodes if each.flops] == ["high"]


HELD = {
    "a tensor": "p = Constant <value = float[3,1] {255, 256, 257}> ()\n",
    "floats": "f = Constant <value_floats = [255., 256., 257.]> ()\n p = Unsqueeze(f, one)\n",
    "whole numbers": "i = Constant <value_ints = [255, 256, 257]> ()\n f = Cast <to = 1> (i)\n p = Unsqueeze(f, one)\n",
    "the branches of an if": """f = Cast <to = 1> (n)
        p = If(c) <then_branch = t () => (float[a,b] u) { u = Unsqueeze(f, one) },
            else_branch = e () => (float[a,b] v) { v = Reshape(f, column) }>
        """,
}


@pytest.mark.parametrize("case", HELD)
def test_positions_in_constants_and_branches_are_counts(case: str) -> None:
    inits = {"F": np.full((1, 64), 0.3, np.float32), "one": np.array([1]), "column": np.array([-1, 1])}
    assert net(f"{HELD[case]} y = MatMul(p, F)", "int64[k] n, bool c", inits) == ["high"]


def test_whole_numbers_of_a_constant_to_which_a_product_is_added_stay_fp32() -> None:
    draws = np.random.default_rng(0)
    inits = {"W": draws.standard_normal((64, 64)).astype(np.float32) / 8, "V": draws.standard_normal((64, 8)).astype(np.float32)}
    inits |= {"at": np.arange(1024)[:, None]}
    model = "h = MatMul(x, W)\n f = Cast <to = 1> (at)\n a = Add(h, f)\n s = Sin(a)\n y = MatMul(s, V)"
    given = parsed(model, "float[1024,64] x", "float[1024,8] y", inits, {"x": draws.standard_normal((1024, 64)).astype(np.float32)})
    assert true_error(given, rewrite_onnx(given.model)) < 1e-3


def test_a_constant_mask_of_whole_numbers_keeps_scores_low() -> None:
    """Zeros and ones are exact in low formats, as those of a boolean mask are."""
    scores = "k = Transpose(x)\n s = MatMul(x, k)\n f = Cast <to = 1> (mask)\n m = Mul(f, far)\n a = Add(s, m)"
    model = f"{scores}\n p = Softmax(a)\n y = MatMul(p, x)"
    inits = {"mask": np.triu(np.ones((64, 64), np.int64), 1), "far": np.float32(-10000)}
    made = rewrite_onnx(parsed(model, "float[64,64] x", "float[64,64] y", inits, {}).model, dtype="bf16", verify=False)
    assert {each.colour.value for each in made.plan.nodes if each.role == "op"} == {"low"}


def test_a_convolution_of_grey_images_runs_low() -> None:
    """Exporters write the 255 into a Constant node."""
    model = "f = Cast <to = 1> (x)\n d = Constant <value = float {255}> ()\n s = Div(f, d)\n y = Conv(s, K)"
    inits = {"K": np.random.default_rng(0).standard_normal((8, 1, 3, 3)).astype(np.float32)}
    made = rewrite_onnx(parsed(model, "uint8[1,1,32,32] x", "float[1,8,30,30] y", inits, {}).model, dtype="bf16", verify=False)
    assert [each.colour.value for each in made.plan.nodes if each.flops] == ["low"]
