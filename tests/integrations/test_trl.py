"""TRL's trainers with the callback, on the real library: supervised fine-tuning, preferences, and policy gradients."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from amprewrite import PolicyError
from amprewrite.runtime.model.rewritten import is_rewritten

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'amprewrite[transformers]'")
pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers' Trainer needs")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", reason="trl is not installed: pip install trl")
datasets = pytest.importorskip("datasets", reason="datasets is not installed, which trl needs")
ours = pytest.importorskip("amprewrite.integrations.transformers")

WORDS = [f"w{number}" for number in range(28)]
STEPS = 3


def tokenizer() -> Any:
    import tokenizers

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def language_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=31,
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def text(number: int, length: int = 4) -> str:
    return " ".join(WORDS[(number + 3 * place) % len(WORDS)] for place in range(length))


def rows(**columns: Any) -> Any:
    return datasets.Dataset.from_list([{name: make(number) for name, make in columns.items()} for number in range(16)])


def supervised(folder: Path, model: Any, callback: Any, **options: Any) -> Any:
    config = trl.SFTConfig(str(folder), max_length=16, **options)
    return trl.SFTTrainer(model, config, train_dataset=rows(text=text), processing_class=tokenizer(), callbacks=[callback])


def preferences(folder: Path, model: Any, callback: Any, **options: Any) -> Any:
    config = trl.DPOConfig(str(folder), max_length=16, **options)
    data = rows(prompt=text, chosen=lambda number: " " + text(number + 1), rejected=lambda number: " " + text(number + 2))
    return trl.DPOTrainer(
        model, language_model(), config, train_dataset=data, processing_class=tokenizer(), callbacks=[callback]
    )


def policy(folder: Path, model: Any, callback: Any, **options: Any) -> Any:
    config = trl.GRPOConfig(str(folder), num_generations=2, max_completion_length=4, **options)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(completion.count("w1")) for completion in completions]

    return trl.GRPOTrainer(
        model, reward_funcs=reward, args=config, train_dataset=rows(prompt=text), processing_class=tokenizer(), callbacks=[callback]
    )


TRAINERS = {"sft": supervised, "dpo": preferences, "grpo": policy}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_trainer_of_trl_runs_with_the_callback(kind: str, dtype: str, tmp_path: Path) -> None:
    found = []
    for callback in (transformers.TrainerCallback(), ours.AmpRewriteCallback(dtype=dtype)):
        model = language_model()
        trainer = TRAINERS[kind](
            tmp_path, model, callback, max_steps=STEPS, per_device_train_batch_size=4, bf16=False, fp16=False, use_cpu=True,
            report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1, learning_rate=1e-3, seed=0, gradient_checkpointing=False,
        )  # fmt: skip
        trainer.train()
        found.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
    plain, mixed = found
    assert is_rewritten(model) and len(mixed) == STEPS
    assert any(node.dtype == dtype for region in model.plan.regions for node in region.nodes)
    if kind != "grpo":  # which samples its own texts
        assert mixed == pytest.approx(plain, rel=0.02, abs=0.02)
    if dtype == "fp16":
        assert model.loss_scale.report().steps == STEPS


def test_trls_default_precision_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"SFTConfig\(bf16=True\) \(TRL's default\)"):
        supervised(tmp_path, language_model(), ours.AmpRewriteCallback(dtype="bf16"), bf16=True, use_cpu=True, report_to=[])
