"""Policy gradients with one set of numbers: the model that samples and the model that is trained are one rewritten model.

    python examples/policy_gradient.py [--steps N] [--dtype bf16,fp16]

A small language model learns to count: a token that is the one before plus one earns a reward. Policy gradients divide the probability
of each sampled token under the trainer by that under the sampler. If nothing was trained in between, that ratio is 1; what is left of it
is rounding. At every step the log-probabilities of the sampled tokens are compared, before the weights move:

    ours                 the rewritten model trains, and samples without gradients
    autocast             torch.autocast trains, and samples without gradients
    autocast and half    torch.autocast trains, a copy of the model in half precision samples, as inference engines do
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from train_char_gpt import GPT

import amprewrite

WORDS, LENGTH, BATCH, WIDTH = 16, 12, 16, 32
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
WAYS = ("ours", "autocast", "autocast and half")
Model = Callable[[Tensor], Tensor]


def log_probabilities(model: Model, tokens: Tensor) -> Tensor:
    """Of each token after the first, in fp32."""
    found = model(tokens[:, :-1]).float().log_softmax(-1)
    return found.gather(-1, tokens[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def sampled(model: Model, rng: torch.Generator) -> Tensor:
    """Texts of LENGTH tokens, one token after another. All calls have the same sizes: later tokens change nothing before them."""
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=rng, device=rng.device)
    for place in range(1, LENGTH + 1):
        chances = model(tokens[:, :-1])[:, place - 1].float().softmax(-1)
        tokens[:, place] = torch.multinomial(chances, 1, generator=rng).squeeze(-1)
    return tokens


def rewards(tokens: Tensor) -> Tensor:
    """1 for each token that goes on counting."""
    return (tokens[:, 1:] == (tokens[:, :-1] + 1) % WORDS).float()


def under_autocast(model: nn.Module, dtype: torch.dtype) -> Model:
    def run(tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, dtype):
            found: Tensor = model(tokens)
        return found

    return run


def gaps(plain: nn.Module, dtype: torch.dtype, tokens: Tensor, trained: Tensor, sampler: Tensor) -> tuple[float, ...]:
    """The largest difference of a log-probability between trainer and sampler, the three ways, at the same weights and tokens."""
    autocast = under_autocast(plain, dtype)
    theirs = log_probabilities(autocast, tokens).detach()
    with torch.no_grad():
        others = log_probabilities(autocast, tokens), log_probabilities(copy.deepcopy(plain).to(dtype), tokens)
    pairs = ((trained.detach(), sampler), *((theirs, other) for other in others))
    return tuple(float((a - b).abs().max()) for a, b in pairs)


def train(dtype: str, steps: int, device: str) -> None:
    torch.manual_seed(0)
    plain = GPT(WORDS, WIDTH).to(device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    amp = amprewrite.rewrite(plain, dtype=dtype, optimizer=optimizer)
    rng = torch.Generator(device).manual_seed(0)
    widest = [0.0] * len(WAYS)
    started = time.perf_counter()
    for step in range(steps):
        amp.eval()
        with amp.frozen_weights(), torch.no_grad():
            tokens = sampled(amp, rng)
            sampler = log_probabilities(amp, tokens)
        earned = rewards(tokens)
        advantage = earned.flip(1).cumsum(1).flip(1)
        advantage = (advantage - advantage.mean(0)) / (advantage.std() + 1e-3)

        amp.train()
        optimizer.zero_grad()
        trained = log_probabilities(amp, tokens)
        ratio = (trained - sampler).exp()
        (-ratio * advantage).mean().backward()
        widest = [max(pair) for pair in zip(widest, gaps(plain, FORMATS[dtype], tokens, trained, sampler), strict=True)]
        optimizer.step()
        if step % max(steps // 5, 1) == 0 or step == steps - 1:
            print(f"{dtype}  step {step:3d}  reward {earned.mean():.3f} a token  {time.perf_counter() - started:5.1f} s", flush=True)
    print(f"\n{dtype}: largest gap of a log-probability between trainer and sampler")
    print("\n".join(f"  {way:18} {gap:.1e}" if gap else f"  {way:18} 0" for way, gap in zip(WAYS, widest, strict=True)) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--dtype", default="bf16,fp16")
    options.add_argument("--device", default="cpu", help="cpu, or cuda")
    asked = options.parse_args()
    for dtype in asked.dtype.split(","):
        train(dtype, asked.steps, asked.device)


if __name__ == "__main__":
    main()
