"""LoRA adapters of the real library: trained, switched, merged, over fp32 and half bases, before and after the rewrite."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import amprewrite
from amprewrite import PolicyError, StaleWeightsError

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
IDS = torch.arange(24).reshape(2, 12)


def gpt2() -> Any:
    torch.manual_seed(0)
    size = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 40, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    model.loss_type = "ForCausalLM"
    return model.eval()


def lora(base: Any, **options: Any) -> Any:
    """Adapters with random weights, so that they change the output from the start."""
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn", "c_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config, **options).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS).logits.float()
    return found


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def losses(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("adapters_first", [True, False])
def test_adapters_train_switch_and_merge_as_in_fp32(adapters_first: bool) -> None:
    plain = lora(gpt2())
    amp = amprewrite.rewrite(lora(gpt2()), dtype="bf16") if adapters_first else lora(amprewrite.rewrite(gpt2(), dtype="bf16"))
    assert losses(amp) == pytest.approx(losses(plain), rel=1e-2)
    plain.load_state_dict(amp.state_dict())
    assert error(logits(amp), logits(plain)) < 2e-2
    with amp.disable_adapter(), plain.disable_adapter():
        assert error(logits(amp), logits(plain)) < 2e-2
    amp.merge_adapter()
    assert error(logits(amp), logits(plain)) < 2e-2
    amp.unmerge_adapter()
    assert error(logits(amp), logits(plain)) < 2e-2
    assert error(logits(amp.merge_and_unload()), logits(plain)) < 2e-2


def test_adapters_over_a_half_base() -> None:
    plain = lora(gpt2().bfloat16())
    amp = amprewrite.rewrite(copy.deepcopy(plain), dtype="bf16")
    assert losses(amp) == pytest.approx(losses(plain), rel=2e-2)
    plain.load_state_dict(amp.state_dict())
    assert error(logits(amp), logits(plain)) < 2e-2
    assert any("parameters are bf16 already and frozen" in note for note in amp.plan.notes)
    with pytest.raises(PolicyError, match="already, and fp32 parameters are the master weights"):
        amprewrite.rewrite(lora(gpt2().bfloat16(), autocast_adapter_dtype=False), dtype="bf16")


def test_a_merge_while_low_copies_are_kept_is_an_error() -> None:
    amp = amprewrite.rewrite(lora(gpt2()), dtype="bf16")
    with pytest.raises(StaleWeightsError, match="changed while low copies were kept"), torch.no_grad(), amp.frozen_weights():
        logits(amp)
        amp.merge_adapter()
    assert error(logits(amp), logits(lora(gpt2()))) < 2e-2


# -- a base of four bits (QLoRA) ------------------------------------------------------------------
def quantised(compute: torch.dtype, folder: Any) -> Any:
    """A small Llama whose layers store four bits, with adapters; `compute` is what bitsandbytes multiplies in."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, max_position_embeddings=16)).save_pretrained(folder)
    bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits, device_map="cpu")
    base.loss_type = "ForCausalLM"
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config)


def adapter_gradients(model: Any, factor: float) -> dict[str, torch.Tensor]:
    (model(input_ids=IDS, labels=IDS).loss * factor).backward()
    learning = [p for p in model.parameters() if p.requires_grad and p.grad is not None]
    return {str(place): p.grad / factor for place, p in enumerate(learning)}


@pytest.mark.parametrize("factor", [1.0, 1e-6])
@pytest.mark.parametrize("own", ["fp32", "low"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_base_of_four_bits_gives_adapters_their_gradients(dtype: str, own: str, factor: float, tmp_path: Any) -> None:
    """In fp16 that of a tiny loss is not flushed: its scale goes through the backward of bitsandbytes, which is linear."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    want = adapter_gradients(quantised(torch.float32, tmp_path), factor)
    low = torch.bfloat16 if dtype == "bf16" else torch.float16
    model = quantised(low if own == "low" else torch.float32, tmp_path)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    amp = amprewrite.rewrite(model, dtype=dtype, optimizer=optimizer)
    got = adapter_gradients(amp, factor)
    assert len(want) == len(got) == 6
    assert all(error(got[name], want[name]) < (4e-2 if dtype == "bf16" else 1e-2) for name in want)
    assert not amp.plan.skipped
