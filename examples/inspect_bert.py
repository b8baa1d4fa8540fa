"""Look at the plan of a transformers BERT (random weights): counts, one layer explained, and the errors it costs.

python examples/inspect_bert.py [--layers N]
"""

from __future__ import annotations

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification

import amprewrite
from amprewrite import verify


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=12)
    asked = options.parse_args()

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=asked.layers, num_attention_heads=4, vocab_size=1000
    )
    model = BertForSequenceClassification(config).eval()
    inputs = {"input_ids": torch.randint(0, 1000, (4, 32)), "attention_mask": torch.ones(4, 32, dtype=torch.long)}

    amp = amprewrite.rewrite(model, dtype="bf16", example_kwargs=inputs)
    print(amp.plan.summary(), "\n")
    print(amp.plan.explain("bert.encoder.layer.0.output"), "\n")
    for cast in amp.plan.casts:
        if not cast.weight:
            print("activation cast:", cast)
    print()
    with torch.no_grad():
        print(verify(amp, kwargs=inputs).table(8))


if __name__ == "__main__":
    main()
