"""`generate()` of a rewritten model: how often it captures, and that new lengths capture nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from runtime_help import low
from torch import nn

from amprewrite.runtime.ambient.low_cache import mark_growing
from amprewrite.runtime.model.rewritten import session_of

transformers = pytest.importorskip("transformers")
SETTINGS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes)).eval()


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=50, decoder_start_token_id=0, **sizes)).eval()


def graphs(amp: nn.Module) -> int:
    return sum(len(entry.graphs.regions) for entry in session_of(amp).entries.values())


@pytest.mark.parametrize(("made", "most"), [(llama, 2), (t5, 4)])
@pytest.mark.long
def test_a_conversation_captures_once(made, most) -> None:
    """Prefill and decoding; with an encoder also that, and the first step of decoding twice: with no cache, and with one of length one."""
    torch.manual_seed(0)
    amp = low(made())
    captured = []
    for length in (5, 9, 14):
        amp.generate(torch.arange(3, 3 + length)[None], **SETTINGS)
        captured.append(graphs(amp))
    assert captured == [most] * 3


@pytest.mark.long
def test_batches_of_several_share_their_graphs() -> None:
    torch.manual_seed(0)
    model = llama()
    amp = low(model)
    amp.generate(torch.arange(3, 13).view(2, 5), **SETTINGS)
    captured = graphs(amp)
    got = amp.generate(torch.arange(3, 24).view(3, 7), **SETTINGS)
    assert graphs(amp) == captured == 2
    assert torch.equal(got, low(model).generate(torch.arange(3, 24).view(3, 7), **SETTINGS))


def test_layers_of_a_cache_share_the_symbol_of_their_length() -> None:
    """With a symbol for each layer's keys and for its values, Dynamo works out every op of every layer anew."""
    torch._dynamo.reset()  # it gives sizes that changed in captures of other tests symbols of their own
    torch.manual_seed(0)
    symbols: list[set[str]] = []

    def look(module: torch.fx.GraphModule, inputs: list[object]) -> object:
        values = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
        sizes = [size for value in values if isinstance(value, torch.Tensor) and value.dim() == 4 for size in value.shape]
        symbols.append({str(size.node._expr) for size in sizes if isinstance(size, torch.SymInt)})
        return module.forward

    low(llama(), backend=look).generate(torch.arange(3, 24).view(3, 7), **SETTINGS)
    assert list(map(len, symbols)) == [0, 2], "no cache for the prompt, then one batch and one length for all layers"


def test_a_length_that_equals_the_batch_by_chance_is_captured_once() -> None:
    """The first step of decoding reads a cache of as many keys as there are sequences."""
    torch.manual_seed(0)
    amp = low(llama())
    amp.generate(torch.arange(3, 12).view(3, 3), **SETTINGS)
    assert graphs(amp) == 2


def test_other_calls_are_captured_as_before() -> None:
    amp = low(llama())
    tokens = torch.arange(3, 8)[None]
    with torch.no_grad():
        amp(tokens)
    assert not hasattr(tokens, "_dynamo_weak_dynamic_indices")


def test_sizes_of_one_and_widths_are_not_marked() -> None:
    tokens, states, image = torch.zeros(1, 4, dtype=torch.long), torch.zeros(2, 4, 8), torch.zeros(2, 3, 8, 8)
    mark_growing((tokens, None), {"states": {"last": states}, "image": image})
    assert tokens._dynamo_weak_dynamic_indices == {1}
    assert states._dynamo_weak_dynamic_indices == {0, 1}
    assert not hasattr(image, "_dynamo_weak_dynamic_indices")


class Decoder(nn.Module):
    """Generates two hidden states, and is given an object of its own with an attribute `layers`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, given: SimpleNamespace) -> torch.Tensor:
        return self.fc(x)

    @torch.no_grad()
    def generate(self, x: torch.Tensor, layers: object) -> torch.Tensor:
        return self(self(x, SimpleNamespace(layers=layers)), SimpleNamespace(layers=layers))


@pytest.mark.parametrize("layers", [12, [None, None], [{"keys": None}], (), [torch.zeros(1, 2, 3, 4)]], ids=type)
def test_layers_of_an_object_that_is_no_cache_of_transformers_are_left_alone(layers: object) -> None:
    model, x = Decoder(), torch.randn(3, 8)
    assert (low(model).generate(x, layers) - model.generate(x, layers)).norm() < 0.05
