"""The networks that the benchmarks run: ten architectures, at their published size for a GPU and scaled down for a CPU.

    python examples/benchmarks/nets.py [--full]        # names, parameters, inputs

Weights are random and inputs are noise: nothing is fetched. Each net takes a batch size and gives a module whose forward returns
the loss, with the arguments for one call.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F


class HuggingFace(nn.Module):
    """A transformers model that returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(**inputs).loss
        return loss


class Classifier(nn.Module):
    """A network under cross entropy."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), labels)


class UNet(nn.Module):
    """Encoder and decoder with group norms and skip connections; predicts its input, as a denoiser does."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(self.block(width * 2**i, width * 2 ** (i + 1)) for i in range(levels))
        self.up = nn.ModuleList(self.block(width * 3 * 2**i, width * 2**i) for i in reversed(range(levels)))
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    @staticmethod
    def block(enter: int, leave: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(enter, leave, 3, padding=1),
            nn.GroupNorm(8, leave),
            nn.SiLU(),
            nn.Conv2d(leave, leave, 3, padding=1),
            nn.GroupNorm(8, leave),
            nn.SiLU(),
        )

    def denoised(self, x: Tensor) -> Tensor:
        h, skips = self.enter(x), []
        for down in self.down:
            skips.append(h)
            h = down(F.avg_pool2d(h, 2))
        for up in self.up:
            h = up(torch.cat([F.interpolate(h, scale_factor=2.0), skips.pop()], 1))
        out: Tensor = self.leave(h)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.denoised(x), x)


class Recurrent(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def scores(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embed(x))[0])
        return out

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x).flatten(0, 1), labels.flatten())


def mlp(width: int, depth: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


Made = tuple[nn.Module, dict[str, Tensor]]


@dataclass(frozen=True)
class Net:
    make: Callable[[bool, int], Made]
    """(published size?, batch size) to the module and the keyword arguments of a call."""
    small: int
    large: int
    """Batch sizes on a GPU; a CPU takes a quarter."""


def tokens(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(1, vocabulary, shape)


def bert(full: bool, batch: int) -> Made:
    length = 128 if full else 32
    small = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1000}
    config = hf.BertConfig(**({} if full else small), attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    x = tokens(config.vocab_size, batch, length)
    return HuggingFace(hf.BertForMaskedLM(config)), {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x}


def gpt2(full: bool, batch: int) -> Made:
    length = 512 if full else 64
    small = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 1001, "bos_token_id": 0, "eos_token_id": 0}
    config = hf.GPT2Config(**({} if full else small), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    x = tokens(config.vocab_size, batch, length)
    model = hf.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else the first call says in the log that it takes this by default, which breaks the graph
    return HuggingFace(model), {"input_ids": x, "labels": x}


def llama(full: bool, batch: int) -> Made:
    width, layers, length, vocabulary = (1024, 12, 512, 32000) if full else (256, 4, 64, 1000)
    config = hf.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        use_cache=False,
    )
    x = tokens(vocabulary, batch, length)
    return HuggingFace(hf.LlamaForCausalLM(config)), {"input_ids": x, "labels": x}


def t5(full: bool, batch: int) -> Made:
    length = 128 if full else 32
    small = {"d_model": 256, "d_ff": 1024, "d_kv": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 1000}
    config = hf.T5Config(**({} if full else small), dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
    x = tokens(config.vocab_size, batch, length)
    return HuggingFace(hf.T5ForConditionalGeneration(config)), {"input_ids": x, "labels": x}


def vit(full: bool, batch: int) -> Made:
    side = 224 if full else 64
    small = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 3, "image_size": side}
    model = hf.ViTForImageClassification(hf.ViTConfig(**({} if full else small), num_labels=1000))
    return HuggingFace(model), {"pixel_values": torch.randn(batch, 3, side, side), "labels": tokens(1000, batch)}


def resnet(full: bool, batch: int) -> Made:
    side = 224 if full else 64
    small = {"embedding_size": 32, "hidden_sizes": [64, 128, 256, 512], "depths": [1, 2, 2, 1]}
    model = hf.ResNetForImageClassification(hf.ResNetConfig(**({} if full else small), num_labels=1000))
    return HuggingFace(model), {"pixel_values": torch.randn(batch, 3, side, side), "labels": tokens(1000, batch)}


def convnext(full: bool, batch: int) -> Made:
    side = 224 if full else 64
    small = {"hidden_sizes": [48, 96, 192, 384], "depths": [1, 1, 3, 1]}
    model = hf.ConvNextForImageClassification(hf.ConvNextConfig(**({} if full else small), num_labels=1000))
    return HuggingFace(model), {"pixel_values": torch.randn(batch, 3, side, side), "labels": tokens(1000, batch)}


def unet(full: bool, batch: int) -> Made:
    side = 128 if full else 32
    return UNet(64 if full else 24, 3), {"x": torch.randn(batch, 3, side, side)}


def odd_mlp(full: bool, batch: int) -> Made:
    width = 4001 if full else 501
    return Classifier(mlp(width, 4)), {"x": torch.randn(batch, width), "labels": tokens(10, batch)}


def lstm(full: bool, batch: int) -> Made:
    width, vocabulary, length = (1024, 10000, 128) if full else (128, 500, 24)
    x = tokens(vocabulary, batch, length)
    return Recurrent(width, 2, vocabulary), {"x": x, "labels": x}


NETS = {
    "bert": Net(bert, 4, 64),
    "gpt2": Net(gpt2, 4, 16),
    "llama": Net(llama, 4, 16),
    "vit": Net(vit, 8, 128),
    "resnet": Net(resnet, 8, 128),
    "convnext": Net(convnext, 8, 128),
    "unet": Net(unet, 8, 64),
    "odd_mlp": Net(odd_mlp, 64, 4096),
    "lstm": Net(lstm, 8, 64),
}
def console() -> Console:
    """Where tables go: as wide as the terminal, and wide enough for any where they are written to a file."""
    return Console(width=None if sys.stdout.isatty() else 160)


MORE = {"t5": Net(t5, 4, 32)}
"""What the suite does not time, but other benchmarks look at."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--full", action="store_true", help="at their published size")
    full = options.parse_args().full
    table = Table("net", "parameters", "input", title="at published size" if full else "scaled down for a CPU")
    for name, net in (NETS | MORE).items():
        with torch.device("meta"):
            model, inputs = net.make(full, net.small)
        first = next(iter(inputs.values()))
        table.add_row(name, f"{sum(p.numel() for p in model.parameters()):,}", "x".join(map(str, first.shape)))
    console().print(table)


if __name__ == "__main__":
    main()
