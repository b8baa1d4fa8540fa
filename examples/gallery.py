"""Plans of twelve architectures as HTML, and an index with casts and errors beside autocast's: `make gallery`, or

    python examples/gallery.py --out build/gallery [--dtype bf16] [--only bert,vit]

Networks are those of the benchmarks, scaled down for a CPU, with random weights: one pass without gradients each. Casts are those that a
pass executes, counted in the dispatcher; a launch that casts many tensors counts once. Errors are strict: fp32 arithmetic, rounded wherever
a plan says low; relative L2 of the outputs. Autocast's error is that of its rules (lists="autocast"). A dash stands where this
machine's kernels refuse the network under autocast. No GPU is needed.
"""

from __future__ import annotations

import argparse
import html
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import amprewrite

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))
from casts_vs_autocast import Casts
from nets import MORE, NETS, Classifier, HuggingFace, UNet

BATCH = 2
Made = tuple[nn.Module, dict[str, Tensor]]


class Predicts(nn.Module):
    """A network whose own forward gives a loss, with the method that gives its predictions in place of that."""

    def __init__(self, net: nn.Module, method: str) -> None:
        super().__init__()
        self.net, self.method = net, method

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.net, self.method)(x)


def without_loss(model: nn.Module, inputs: dict[str, Tensor]) -> Made:
    """The network under a loss, with the inputs of a call that gives its predictions."""
    inputs = dict(inputs)
    labels = inputs.pop("labels", None)
    if isinstance(model, HuggingFace):
        if model.model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = labels
        return model.model, inputs
    if isinstance(model, Classifier):
        return model.net, {"input": inputs["x"]}
    return Predicts(model, "denoised" if isinstance(model, UNet) else "scores"), inputs


def whisper() -> Made:
    size = {"d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = hf.WhisperConfig(
        **size, encoder_ffn_dim=512, decoder_ffn_dim=512, vocab_size=1000, num_mel_bins=40, max_source_positions=50,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip
    sound = torch.randn(BATCH, 40, 100)
    return hf.WhisperForConditionalGeneration(config), {
        "input_features": sound, "decoder_input_ids": torch.randint(3, 1000, (BATCH, 12))
    }  # fmt: skip


def clip() -> Made:
    text = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 500}
    vision = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 16,
    }
    config = hf.CLIPConfig(text_config={**text, "eos_token_id": 2}, vision_config=vision, projection_dim=64)
    words = torch.randint(3, 500, (BATCH, 12))
    return hf.CLIPModel(config), {"input_ids": words, "pixel_values": torch.randn(BATCH, 3, 64, 64)}


def benchmark(name: str) -> Callable[[], Made]:
    return lambda: without_loss(*(NETS | MORE)[name].make(False, BATCH))


SHOWN: dict[str, Callable[[], Made]] = {
    **{name: benchmark(name) for name in ("bert", "gpt2", "llama", "t5", "vit", "resnet", "convnext", "unet", "lstm", "odd_mlp")},
    "whisper": whisper,
    "clip": clip,
}


@dataclass(frozen=True)
class Row:
    """One network of the index."""

    name: str
    parameters: int
    ops: int
    low: int
    autocast_casts: int | None
    casts: int
    autocast_error: float
    error: float

    def cells(self) -> tuple[str, ...]:
        link = f'<a href="{self.name}.html">{html.escape(self.name)}</a>'
        counts = (f"{self.parameters:,}", f"{self.ops}", f"{self.low}", shown(self.autocast_casts), f"{self.casts}")
        return (link, *counts, f"{self.autocast_error:.2e}", f"{self.error:.2e}")


def shown(count: int | None) -> str:
    return "–" if count is None else f"{count}"


HEADS = ("network", "parameters", "ops", "low", "casts, autocast", "casts, ours", "error, autocast's rules", "error, ours")
STYLE = """:root { color-scheme: light dark } body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem }
table { border-collapse: collapse; width: 100% } td, th { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid #8884 }
td:first-child, th:first-child { text-align: left }"""


def executed(run: Callable[[], Any]) -> int:
    """Casts of one pass; a first one captures."""
    run()
    with Casts() as casts:
        run()
    return casts.count


def under_autocast(model: nn.Module, inputs: dict[str, Tensor], low: torch.dtype) -> int | None:
    """Casts of one pass under torch.autocast; None if a kernel refuses it."""

    def run() -> Any:
        with torch.autocast("cpu", low):  # one region a pass: it keeps low copies of weights until it ends
            return model(**inputs)

    try:
        return executed(run)
    except RuntimeError as error:
        print(f"torch.autocast cannot run {type(model).__name__} here: {error}", file=sys.stderr)
        return None


def drawn(name: str, dtype: str, folder: Path) -> Row:
    """Write the report of one network, and give its row."""
    torch.manual_seed(0)
    model, inputs = SHOWN[name]()
    model.eval()
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    with torch.no_grad():
        theirs = under_autocast(model, inputs, low)
        rules = amprewrite.verify(amprewrite.rewrite(model, dtype=dtype, lists="autocast"), kwargs=inputs)
        amp = amprewrite.rewrite(model, dtype=dtype)
        ours = executed(lambda: amp(**inputs))
        report = amprewrite.verify(amp, kwargs=inputs)
    plan: Any = amp.plan
    plan.to_html(folder / f"{name}.html", title=f"{name} in {dtype}", report=report)
    colours = [node.colour.value for node in plan.nodes if node.role == "op"]
    parameters = sum(p.numel() for p in model.parameters())
    return Row(name, parameters, len(colours), colours.count("low"), theirs, ours, rules.output_error, report.output_error)


def index(rows: list[Row], dtype: str) -> str:
    """The page that links all reports."""
    told = html.escape((__doc__ or "").partition("\n\n")[2].partition("\n\n")[2])
    head = "".join(f"<th>{cell}</th>" for cell in HEADS)
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row.cells())}</tr>" for row in rows)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Cast plans, {dtype}</title><style>{STYLE}</style>\n'
        f"<h1>Cast plans of {len(rows)} networks, {dtype}</h1>\n<p>{told}</p>\n"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>\n"
        f"<p>amprewrite {amprewrite.__version__}, torch {torch.__version__}</p></html>\n"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", default="build/gallery", help="folder for index.html and a report a network")
    options.add_argument("--dtype", default="bf16", choices=["bf16", "fp16"])
    options.add_argument("--only", default=",".join(SHOWN))
    asked = options.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder = Path(asked.out)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in asked.only.split(","):
        row = drawn(name, asked.dtype, folder)
        rows.append(row)
        print(
            f"{name}: {row.low} of {row.ops} ops low; casts {row.casts}, autocast {shown(row.autocast_casts)}; "
            f"error {row.error:.2e}, autocast's rules {row.autocast_error:.2e}",
            flush=True,
        )
    (folder / "index.html").write_text(index(rows, asked.dtype))
    print(folder / "index.html")


if __name__ == "__main__":
    main()
