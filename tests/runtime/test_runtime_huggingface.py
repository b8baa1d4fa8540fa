"""Models of transformers as they come: outputs that are dataclasses, caches, generate(), an encoder called by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from runtime_help import low, matmul_dtypes, ran_low
from tiers import long_beyond

import amprewrite

transformers = pytest.importorskip("transformers")
EXPERTS = getattr(transformers.integrations, "moe", None)
"""None before transformers 5."""


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    return transformers.GPT2LMHeadModel(config)


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, dropout_rate=0.0
    )
    return transformers.T5ForConditionalGeneration(config)


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, max_position_embeddings=32
    )
    return transformers.BertForSequenceClassification(config)


def mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


IDS = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", long_beyond(1, [llama, gpt2, bert]))
def test_training_step(make):
    model = make().train()
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    labels = IDS if make is not bert else torch.tensor([0, 1])
    amp = low(model)
    out = amp(input_ids=IDS, labels=labels)
    want = copy.deepcopy(model)(input_ids=IDS, labels=labels)
    assert type(out) is type(want) and list(out.keys()) == list(want.keys())
    assert out.loss.dtype == torch.float32 and ran_low(out.logits, want.logits)
    out.loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    assert matmul_dtypes(amp, input_ids=IDS, labels=labels) <= {torch.bfloat16, torch.float32}
    assert isinstance(amp, type(model)) and amp.config is model.config and amp.device == model.device


@pytest.mark.skipif(not hasattr(EXPERTS, "_grouped_mm_fallback"), reason="torch.compile cannot capture the experts of this transformers")
@pytest.mark.parametrize("dtype", long_beyond(1, ["bf16", "fp16"]))
def test_experts_run_low_forward_and_backward(dtype):
    """Captured, they are calls of an op of transformers, which torch.autocast does not know."""
    model = mixtral()
    model(input_ids=IDS, labels=IDS).loss.backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    other = mixtral()
    amp = low(other, dtype=dtype, optimizer=torch.optim.SGD(other.parameters(), lr=0.0))
    amp(input_ids=IDS, labels=IDS).loss.backward()
    experts = [node for node in amp.plan.nodes if "grouped_mm" in node.op or node.op == "bmm"]
    assert len(experts) >= 2 and all(node.colour.value == "low" and node.flops for node in experts if "grouped_mm" in node.op)
    assert any("grouped_mm" in node.op for node in experts) and "on no list" not in amp.plan.counts()
    for name, p in amp.named_parameters():
        assert float((p.grad - want[name]).norm() / want[name].norm()) < (4e-2 if dtype == "bf16" else 6e-3), name


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.long
def test_generate_greedy_with_a_cache(make):
    model = make().eval()
    amp = low(model)
    got = amp.generate(IDS, max_new_tokens=6, do_sample=False)
    want = model.generate(IDS, max_new_tokens=6, do_sample=False)
    assert got.shape == want.shape and torch.equal(got[:, :7], IDS)
    assert (got == want).float().mean() > 0.8
    assert len(amp.plans) <= 4  # prefill, steps, and what dynamic shapes add
    with torch.no_grad():
        assert torch.bfloat16 in matmul_dtypes(amp, IDS)


def test_cache_goes_out_and_comes_in():
    model = llama().eval()
    amp = low(model)
    with torch.no_grad():
        first = amp(IDS, use_cache=True)
        plain = model(IDS, use_cache=True)
        step = IDS[:, -1:]
        got, want = amp(step, past_key_values=first.past_key_values), model(step, past_key_values=plain.past_key_values)
    assert type(first.past_key_values) is type(plain.past_key_values)
    assert ran_low(got.logits, want.logits)


@pytest.mark.filterwarnings("ignore::amprewrite.AmpRewriteWarning")  # torch 2.11 breaks at a copy of the configuration
@pytest.mark.long
def test_t5_generate_and_its_encoder_alone():
    model = t5().eval()
    amp = low(model)
    with torch.no_grad():
        assert ran_low(amp.encoder(IDS).last_hidden_state, model.encoder(IDS).last_hidden_state)
        assert amp.plan.regions[0].entry == "encoder"
        assert ran_low(amp(input_ids=IDS, labels=IDS).logits, model(input_ids=IDS, labels=IDS).logits)
    got = amp.generate(IDS, max_new_tokens=4, do_sample=False)
    assert got.shape == model.generate(IDS, max_new_tokens=4, do_sample=False).shape


def test_gradient_checkpointing():
    model = llama().train()
    amp = low(model)
    amp(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    amp.gradient_checkpointing_enable()
    amp(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name], rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("dtype", long_beyond(1, ["fp16", "bf16"]))
@torch.no_grad()
def test_left_padding_with_a_static_cache(dtype):
    """generate() makes the mask outside the model: rows that block all positions hold fp32's lowest number."""
    model = llama().eval()
    model.set_attn_implementation("eager")
    mask = torch.ones_like(IDS)
    mask[1, :3] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    want = model.generate(input_ids=IDS, attention_mask=mask, **options)
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype=dtype)
    got = amp.generate(input_ids=IDS, attention_mask=mask, **options)
    assert ran_low(got.logits[0], want.logits[0])
