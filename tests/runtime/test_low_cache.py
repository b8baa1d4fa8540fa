"""The cache of `generate()`: low where attention reads it low, with the same results; fp32 again wherever another reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime_help import low
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import amprewrite
from amprewrite.runtime.ambient.low_cache import hold_fp32, hold_low, is_low
from amprewrite.runtime.model.rewritten import session_of

transformers = pytest.importorskip("transformers")
SETTINGS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
HEADS = {"num_key_value_heads": 1}


class LargestCast(TorchDispatchMode):
    """The elements of the largest value of heads that was cast."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dim() >= 4 and result.dtype != args[0].dtype:
            self.elements = max(self.elements, args[0].numel())
        return result


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).eval()


def mistral() -> nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=8, **SIZES, **HEADS)).eval()


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=50, decoder_start_token_id=0, **sizes)).eval()


def prompt(batch: int = 1) -> Tensor:
    return torch.arange(3, 3 + 12 * batch).view(batch, 12)


def caches_as_they_are(model: nn.Module, **options: Any) -> nn.Module:
    amp = amprewrite.rewrite(model, dtype="bf16", **options)
    session_of(amp).caches.low = False
    return amp


def decoding_casts(amp: nn.Module, **settings: Any) -> int:
    amp.generate(prompt(), **SETTINGS, **settings)
    with LargestCast() as cast:
        amp.generate(prompt(), **SETTINGS, **settings)
    return cast.elements


@pytest.mark.long
@pytest.mark.parametrize("make", [llama, mistral, t5])
def test_tokens_are_those_of_an_fp32_cache(make) -> None:
    torch.manual_seed(0)
    model = make()
    amp, plain = low(model), caches_as_they_are(model)
    assert torch.equal(amp.generate(prompt(), **SETTINGS), plain.generate(prompt(), **SETTINGS))
    assert session_of(amp).caches.low


def test_no_step_casts_the_cache() -> None:
    torch.manual_seed(0)
    model = llama()
    cast, before = decoding_casts(low(model)), decoding_casts(caches_as_they_are(model))
    assert cast <= 1 * 1 * 12 * 16 < before, "keys or values of the prompt, but not those with a token more"


@pytest.mark.long
def test_no_step_casts_a_static_cache() -> None:
    torch.manual_seed(0)
    model = llama()
    static = {"cache_implementation": "static"}
    amp, plain = low(model), caches_as_they_are(model)
    assert decoding_casts(amp, **static) <= 1 * 1 * 12 * 16 < decoding_casts(plain, **static)
    assert torch.equal(amp.generate(prompt(), **SETTINGS, **static), plain.generate(prompt(), **SETTINGS, **static))


@pytest.mark.long
def test_beams_reorder_a_low_cache() -> None:
    torch.manual_seed(0)
    model = llama()
    settings = {**SETTINGS, "num_beams": 3}
    assert torch.equal(low(model).generate(prompt(2), **settings), caches_as_they_are(model).generate(prompt(2), **settings))


@pytest.mark.long
def test_attention_in_fp32_keeps_the_cache_in_fp32() -> None:
    torch.manual_seed(0)
    model = llama()
    overrides = {"scaled_dot_product_attention": "deny"}
    amp, plain = amprewrite.rewrite(model, dtype="bf16", overrides=overrides), caches_as_they_are(model, overrides=overrides)
    assert torch.equal(amp.generate(prompt(), **SETTINGS), plain.generate(prompt(), **SETTINGS))
    assert not session_of(amp).caches.low
    assert any("in fp32, as the plan reads it" in note for note in amp.plan.notes)
    assert sum(len(entry.graphs.regions) for entry in session_of(amp).entries.values()) == 2


def test_a_cache_that_the_caller_gets_is_fp32() -> None:
    amp = low(llama())
    amp.generate(prompt(), **SETTINGS)
    got = amp.generate(prompt(), return_dict_in_generate=True, **SETTINGS).past_key_values
    layer = got.layers[0]
    assert type(layer) is transformers.cache_utils.DynamicLayer and layer.keys.dtype == layer.values.dtype == torch.float32


@pytest.mark.long
def test_a_cache_that_outlives_generate_is_fp32_again() -> None:
    kept: list[Any] = []

    class Keeps(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def _update_model_kwargs_for_generation(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            kept.append(outputs.past_key_values)
            assert is_low(outputs.past_key_values.layers[0])
            return super()._update_model_kwargs_for_generation(outputs, *args, **kwargs)

    low(Keeps(transformers.LlamaConfig(**SIZES, **HEADS)).eval()).generate(prompt(), **SETTINGS)
    layer = kept[0].layers[0]
    assert type(layer) is transformers.cache_utils.DynamicLayer
    assert layer.keys.dtype == layer.dtype == torch.float32 and layer.get_seq_length() == 15


def test_a_low_layer_looks_like_one_in_fp32() -> None:
    layer = transformers.cache_utils.DynamicLayer()
    hold_low(layer, torch.bfloat16)
    assert isinstance(layer, transformers.cache_utils.DynamicLayer) and not layer.is_initialized and layer.get_seq_length() == 0

    @torch.compile(backend="eager")
    def step(new: Tensor) -> Tensor:
        keys, _ = layer.update(new, new)
        return keys

    new = torch.randn(1, 2, 3, 4)
    torch.testing.assert_close(step(new), new.bfloat16().float(), rtol=0, atol=0)
    assert layer.keys.dtype == layer.dtype == torch.float32 and layer.get_seq_length() == 3
    hold_fp32(layer)
    assert torch.equal(layer.keys, new.bfloat16().float())


def test_code_that_is_not_captured_rounds_nothing() -> None:
    layer = transformers.cache_utils.DynamicLayer()
    hold_low(layer, torch.bfloat16)
    new = torch.randn(1, 2, 3, 4)
    keys, _ = layer.update(new, new)
    assert torch.equal(keys, new) and not is_low(layer)


@pytest.mark.parametrize("writes", [False, True])
def test_a_low_value_is_read_as_it_is_unless_it_is_written_later(writes: bool) -> None:
    class Stored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("store", torch.randn(4, 8).bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            high = self.store.to(x.dtype)
            if writes:
                self.store.zero_()
            return self.linear(high + 0 * x)

    torch.manual_seed(0)
    model = Stored().eval()
    want = model.linear(model.store.float())
    amp = low(model)
    with torch.no_grad():
        got = amp(torch.zeros(4, 8))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    if writes:
        assert not model.store.any()
        assert next(node for node in amp.plan.nodes if node.op == "to").colour.value == "high"
