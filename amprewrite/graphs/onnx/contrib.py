"""Ops of ONNX Runtime's own domain, com.microsoft, which exporters and its optimiser put into files.

onnx has no schemas for them; the rows repeat what ONNX Runtime 1.31 registers (docs/ContribOperators.md), and a test compares
them with it. What has no row is a high-precision wall: MatMulNBits and the other quantised ops among them.
"""

from __future__ import annotations

from dataclasses import dataclass

DOMAIN = "com.microsoft"


@dataclass(frozen=True)
class Contrib:
    """One op: its name in the vocabulary, and the type variable of each input and output."""

    name: str
    inputs: str
    """A letter each: T is the op's own type, M another floating one, U always fp32, I an integer."""
    outputs: str = "T"
    newer: bool = True
    """Whether T may be a format that ONNX Runtime's CPU kernels lack, too (bf16)."""


CONTRIB = {
    "Attention": Contrib("scaled_dot_product_attention", "TTTITTI", "TT"),
    "BiasAdd": Contrib("add", "TTT", newer=False),
    "BiasGelu": Contrib("gelu", "TT"),
    "BiasSoftmax": Contrib("softmax", "TT", newer=False),
    "BiasSplitGelu": Contrib("gelu", "TT", newer=False),
    "EmbedLayerNormalization": Contrib("layer_norm", "IITTTTTII", "TIT", newer=False),
    "FastGelu": Contrib("gelu", "TT"),
    "FusedConv": Contrib("conv2d", "TTTT", newer=False),
    "FusedGemm": Contrib("addmm", "TTT", newer=False),
    "FusedMatMul": Contrib("matmul", "TT"),
    "Gelu": Contrib("gelu", "T"),
    "GroupNorm": Contrib("group_norm", "TMM", newer=False),
    "MultiHeadAttention": Contrib("scaled_dot_product_attention", "TTTTITTTII", "TTTM"),
    "NhwcConv": Contrib("conv2d", "TTT", newer=False),
    "QuickGelu": Contrib("silu", "T"),
    "RotaryEmbedding": Contrib("mul", "TITT"),
    "SkipGroupNorm": Contrib("group_norm", "TMMTT", "TT", newer=False),
    "SkipLayerNormalization": Contrib("layer_norm", "TTTTT", "TUUT"),
    "SkipSimplifiedLayerNormalization": Contrib("rms_norm", "TTTT", "TUUT"),
    "TransposeMatMul": Contrib("matmul", "TT"),
}
