"""Twelve networks at published width, one or two layers deep, at 1,024 positions and more: a yardstick of real sizes.

    python examples/benchmarks/wall/real_size.py [--only llama,bert] [--dtype bf16,fp16] [--layers 2] [--length 4096] [--device cuda]

Sizes that tests lack show what rounding does to positions, counts and long sums. Weights are drawn as if trained, so that attention
depends on positions: each row says by how much results change with positions in reverse. Outputs and gradients are judged as in the other
walls, beside fp32 and torch.autocast. `--small` divides widths, sides and the usual length by eight, to see that it runs.
"""

from __future__ import annotations

import functools
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from children import GIGABYTES, Row, chosen, follow, parser, run_cases
from judging import GOOD, SECONDS, Given, asks_formats, formats, judge, seeds, show, warm_up
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from weights import as_trained

WORDS = 4096
"""Vocabulary: the width of what stands behind the embedding is published, the number of rows is not looked at."""
SMALL = 8
LENGTH = 1024


@dataclass(frozen=True)
class Size:
    layers: int = 1
    length: int | None = None
    batch: int = 1
    small: bool = False

    def __call__(self, published: int) -> int:
        """A width or a side: as published, or an eighth of it."""
        return published // SMALL if self.small else published

    @property
    def positions(self) -> int:
        return self.length or self(LENGTH)


class Denoiser(nn.Module):
    """A U-Net of two levels: convolutions that are told the time step by its sines, attention over all places of the lower level."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 2 * width))
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.up = nn.Conv2d(width, 2 * width, 3, 2, 1), nn.Conv2d(3 * width, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, each) for each in (width, 2 * width, width))
        self.queries, self.mix = nn.Linear(2 * width, 6 * width), nn.Linear(2 * width, 2 * width)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        half = self.width // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half, device=sample.device) / half)
        angles = timestep[:, None].float() * frequencies
        when = self.time(torch.cat([angles.cos(), angles.sin()], -1))[..., None, None]
        skip = F.silu(self.norms[0](self.enter(sample)))
        h = self.norms[1](self.down(skip)) + when
        rows = h.flatten(2).mT
        q, k, v = (each.unflatten(-1, (8, -1)).transpose(1, 2) for each in self.queries(rows).chunk(3, -1))
        rows = rows + self.mix(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        h = F.interpolate(F.silu(rows.mT.reshape(h.shape)), scale_factor=2.0)
        out: Tensor = self.leave(F.silu(self.norms[2](self.up(torch.cat([h, skip], 1)))))
        return out


def denoiser(size: Size) -> tuple[nn.Module, Given]:
    """The time steps are whole numbers that bf16 does not hold."""
    steps = torch.arange(size.batch) * 77 + 901
    return Denoiser(size(256)), {"sample": torch.randn(size.batch, 3, size(64), size(64)), "timestep": steps}


def _decoder(config: Any, size: Size, width: int, heads: int, groups: int, inner: int, **more: Any) -> Any:
    """The configuration of a decoder with rotary positions."""
    return config(
        vocab_size=WORDS, hidden_size=size(width), intermediate_size=size(inner), num_hidden_layers=size.layers,
        num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=size.positions, use_cache=False, **more,
    )  # fmt: skip


CONFIGS: dict[str, Callable[[Size], Any]] = {
    "bert": lambda size: hf.BertConfig(
        vocab_size=WORDS, hidden_size=size(768), intermediate_size=size(3072), num_hidden_layers=size.layers,
        max_position_embeddings=size.positions, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "gpt2": lambda size: hf.GPT2Config(
        vocab_size=WORDS, n_embd=size(768), n_layer=size.layers, n_positions=size.positions, use_cache=False, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "llama": lambda size: _decoder(hf.LlamaConfig, size, 2048, 32, 8, 8192),
    "qwen": lambda size: _decoder(hf.Qwen3Config, size, 1024, 16, 8, 3072, head_dim=size(128)),
    "mixtral": lambda size: _decoder(hf.MixtralConfig, size, 1024, 16, 4, 3584),  # its width is a quarter, for memory
    "t5": lambda size: hf.T5Config(
        vocab_size=WORDS, d_model=size(768), d_kv=size(64), d_ff=size(3072), num_layers=size.layers, num_heads=12, dropout_rate=0.0,
        use_cache=False,
    ),
    "vit": lambda size: hf.ViTConfig(
        hidden_size=size(768), intermediate_size=size(3072), num_hidden_layers=size.layers, image_size=size(512),
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "swinv2": lambda size: hf.Swinv2Config(
        image_size=size(256), embed_dim=size(96), depths=[size.layers] * 4, drop_path_rate=0.0, window_size=size(16),
    ),
    "convnext": lambda size: hf.ConvNextConfig(
        image_size=size(512), hidden_sizes=[size(each) for each in (96, 192, 384, 768)], depths=[size.layers] * 4,
    ),
    "whisper": lambda size: hf.WhisperConfig(
        d_model=size(768), encoder_layers=size.layers, encoder_attention_heads=12, encoder_ffn_dim=size(3072), dropout=0.0,
        max_source_positions=size(1500),
    ),
    "mamba": lambda size: hf.Mamba2Config(
        vocab_size=WORDS, hidden_size=size(768), state_size=size(128), num_heads=24, head_dim=size(64), n_groups=1,
        num_hidden_layers=size.layers, chunk_size=size(256), use_cache=False,
    ),
}  # fmt: skip
NETS = (*CONFIGS, "unet")


def of_transformers(config: Any, size: Size) -> tuple[nn.Module, Given]:
    """The base model of a configuration, and inputs for what it reads first: tokens of which some are padding, images, or 30 s of sound."""
    model: nn.Module = hf.AutoModel.from_config(config)
    if isinstance(config, hf.WhisperConfig):
        model = model.get_encoder()
    read = model.main_input_name
    if read == "pixel_values":
        return model, {read: torch.randn(size.batch, 3, config.image_size, config.image_size)}
    if read == "input_features":
        return model, {read: torch.randn(size.batch, config.num_mel_bins, 2 * config.max_source_positions)}
    ids = torch.randint(3, WORDS, (size.batch, size.positions))
    mask = torch.ones_like(ids)
    mask[::2, -(size.positions // 8) :] = 0
    both = {"decoder_input_ids": ids.flip(-1)[:, : size.positions // 4]} if config.is_encoder_decoder else {}
    return model, {read: ids, "attention_mask": mask, **both}


def built(size: Size, device: str, name: str) -> tuple[nn.Module, Given]:
    """A net in train mode with weights as if trained, and what it is called with."""
    hf.logging.set_verbosity_error()
    seeds(0)
    model, given = denoiser(size) if name == "unet" else of_transformers(CONFIGS[name](size), size)
    model = as_trained(model.float().train()).to(device)
    return model, {key: each.to(device) for key, each in given.items()}


def asks_sizes(options: ArgumentParser) -> None:
    options.add_argument("--layers", type=int, default=1)
    options.add_argument("--length", type=int, help=f"positions of a text; {LENGTH} unless told")
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--device", default="cpu", help="cpu, or cuda")
    options.add_argument("--jobs", type=int, default=1, help="nets at the same time")
    options.add_argument("--small", action="store_true", help=f"widths, sides and the usual length divided by {SMALL}")


def size_of(asked: Namespace) -> Size:
    return Size(asked.layers, asked.length, asked.batch, asked.small)


def rows_of(asked: Namespace) -> list[Row]:
    """Judge the nets that were asked for, each in a process of its own."""
    kept = chosen(NETS, asked)
    work = functools.partial(judge, functools.partial(built, size_of(asked), asked.device), formats(asked), device=asked.device)
    memory = GIGABYTES if asked.device == "cpu" else None
    return follow(run_cases(kept, work, asked.out, asked.seconds, memory, asked.jobs), len(kept), GOOD)


def table(rows: Sequence[Row], dtypes: Sequence[str]) -> Table:
    """A row a net and format: relative errors of results and gradients, ours beside torch.autocast's."""
    shown = Table("net", "format", "outcome", "results", "autocast's", "gradients", "autocast's", "positions change", "seconds")
    for row in rows:
        for dtype in (each for each in dtypes if each in row):
            pairs = zip(row[dtype].get("errors", [math.nan] * 2), row[dtype].get("autocast", [math.nan] * 2), strict=True)
            errors = [f"{each:.2e}" for pair in pairs for each in pair]
            moved = "" if row["positions"] is None else f"{row['positions']:.2f}"
            shown.add_row(row["name"], dtype, row[dtype]["outcome"], *errors, moved, f"{row['seconds']:.0f}")
    return shown


def main() -> None:
    options = parser(__doc__, 2 * SECONDS)
    asks_formats(options)
    asks_sizes(options)
    asked = options.parse_args()
    if asked.device == "cpu":
        warm_up()
    rows = rows_of(asked)
    Console(width=160).print(table(rows, formats(asked)))
    show(f"real sizes, {asked.device}, torch {torch.__version__}, transformers {hf.__version__}", rows, asked)
    sys.exit(any(row["outcome"] not in GOOD for row in rows))


if __name__ == "__main__":
    main()
