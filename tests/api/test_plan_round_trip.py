"""Edit → save → read → apply → plan again is exact, on small transformers of many families and some other networks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.ir.plans.versions import SCHEMA
from amprewrite.report.cast_plan import CastPlan
from amprewrite.tables.vocabulary import Colour, Reason

transformers = pytest.importorskip("transformers", reason="the examples extra is not installed")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}


def text(config: str, model: str, **changes: Any) -> Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]:
    def build() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        made = getattr(transformers, model)(getattr(transformers, config)(**{**SMALL, **changes}))
        return made.eval(), {"input_ids": torch.randint(0, 99, (2, 8))}

    return build


def image(config: str, model: str) -> Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]:
    def build() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
        made = getattr(transformers, model)(getattr(transformers, config)(**sizes, image_size=32, patch_size=8))
        return made.eval(), {"pixel_values": torch.randn(2, 3, 32, 32)}

    return build


def t5() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=99)
    ids = torch.randint(0, 99, (2, 8))
    return transformers.T5Model(config).eval(), {"input_ids": ids, "decoder_input_ids": ids}


def convnet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 4), nn.Softmax(-1))
    return body.eval(), {"input": torch.randn(2, 3, 16, 16)}


CASES = {
    "bert": text("BertConfig", "BertModel"),
    "roberta": text("RobertaConfig", "RobertaModel"),
    "electra": text("ElectraConfig", "ElectraModel", embedding_size=32),
    "mpnet": text("MPNetConfig", "MPNetModel"),
    "gpt2": text("GPT2Config", "GPT2Model", n_embd=32, n_layer=2, n_head=2),
    "gpt_neox": text("GPTNeoXConfig", "GPTNeoXModel"),
    "llama": text("LlamaConfig", "LlamaModel"),
    "qwen2": text("Qwen2Config", "Qwen2Model", num_key_value_heads=2),
    "gemma": text("GemmaConfig", "GemmaModel", num_key_value_heads=2, head_dim=16),
    "phi3": text("Phi3Config", "Phi3Model", pad_token_id=0),
    "opt": text("OPTConfig", "OPTModel", ffn_dim=64, word_embed_proj_dim=32),
    "t5": t5,
    "vit": image("ViTConfig", "ViTModel"),
    "convnet": convnet,
}


OFTEN = {"bert", "llama", "t5", "vit", "convnet"}
"""Architectures of every run; the others run with `make slow`."""


@pytest.mark.parametrize("name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
@pytest.mark.long
def test_edit_save_read_apply_plan_again(name: str) -> None:
    model, inputs = CASES[name]()
    with torch.no_grad():
        plan = amprewrite.plan(model, (), inputs, dtype="bf16")
        assert CastPlan.from_json(plan.to_json()) == plan
        followed = amprewrite.plan(model, (), inputs, plan=CastPlan.from_json(plan.to_json()))
        told = [[(n.name, n.colour, n.reason, n.dtype) for n in each.nodes] for each in (plan, followed)]
        assert told[0] == told[1]
        assert followed.casts == plan.casts

        candidates = [n for n in plan.nodes if n.role == "op" and n.colour is Colour.LOW and n.reason is Reason.ON_ALLOWLIST]
        changed = {n.name: "high" for n in (candidates[0], candidates[-1])}
        edited = CastPlan.from_json(plan.edit(changed).to_json())
        applied = amprewrite.plan(model, (), inputs, plan=edited)
        again = amprewrite.plan(model, (), inputs, plan=CastPlan.from_json(applied.to_json()))
    assert applied.nodes == again.nodes and applied.casts == again.casts
    differ = {n.name for n, m in zip(plan.nodes, applied.nodes, strict=True) if n.colour is not m.colour}
    assert differ == set(changed)
    assert plan.diff(applied).count("low -> high (the given plan says so)") == len(changed)


def test_the_schema_is_versioned_and_documented() -> None:
    """Every key that is written is described, and no other."""
    model, inputs = convnet()
    assert "quantised" not in amprewrite.plan(model, (), inputs, dtype="bf16").to_json()  # only plans that weighed fp8 have it
    small = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    data = json.loads(amprewrite.plan(small, (torch.ones(4, 16),), dtype="bf16", products="fp8-all").to_json())
    assert data["version"] == SCHEMA
    described = CastPlan.schema()
    region = data["regions"][0]
    parts = {"plan": data, "region": region, "node": region["nodes"][0], "cast": region["casts"][0], "quantised": region["quantised"]}
    for kind, held in parts.items():
        assert set(held) == set(described[kind]), kind
    assert all(meaning for keys in described.values() for meaning in keys.values())
