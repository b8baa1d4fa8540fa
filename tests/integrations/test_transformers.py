"""The quantization config and the Trainer's callback, on the real library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import amprewrite
from amprewrite import AmpRewriteWarning, DynamicLossScale, PolicyError
from amprewrite.runtime.model.rewritten import is_rewritten

transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5.0 is missing: pip install 'amprewrite[transformers]'")
ours = pytest.importorskip("amprewrite.integrations.transformers")


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=40, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


IDS = torch.arange(16).reshape(2, 8)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.randint(0, 40, (8,), generator=torch.Generator().manual_seed(index)), "labels": index % 2}


def arguments(folder: Path, **options: Any) -> Any:
    pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers' Trainer needs")
    return transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=4, save_strategy="no",
        **{"max_steps": 8, "logging_steps": 1, "learning_rate": 1e-3, **options},
    )  # fmt: skip


# the config ------------------------------------------------------------------------------------------------------------


def test_from_pretrained_rewrites_and_the_config_is_saved_with_the_model(tmp_path: Path):
    plain = bert()
    plain.save_pretrained(tmp_path / "plain")
    config = ours.AmpRewriteConfig(dtype="fp16", overrides={"module:classifier": "fp32"})
    model = type(plain).from_pretrained(tmp_path / "plain", quantization_config=config).eval()
    expected = amprewrite.rewrite(plain.eval(), dtype="fp16", overrides={"module:classifier": "fp32"})(input_ids=IDS).logits
    assert torch.equal(model(input_ids=IDS).logits, expected) and is_rewritten(model) and model.plan.low == "fp16"
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["quantization_config"] == {"quant_method": "amprewrite", "dtype": "fp16", "overrides": {"module:classifier": "fp32"}}
    assert saved["architectures"] == ["BertForSequenceClassification"]
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(input_ids=IDS).logits, expected)


def test_a_plan_is_saved_with_the_model(tmp_path: Path):
    plain = bert().eval()
    plain.save_pretrained(tmp_path / "plain")
    plan = amprewrite.plan(plain, kwargs={"input_ids": IDS}, dtype="bf16", overrides={"module:classifier": "fp32"})
    model = type(plain).from_pretrained(tmp_path / "plain", quantization_config=ours.AmpRewriteConfig(plan=plan))
    model.save_pretrained(tmp_path / "saved")
    again = type(plain).from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(input_ids=IDS).logits, amprewrite.rewrite(plain, plan=plan)(input_ids=IDS).logits)
    (classifier,) = [node for node in again.plan.regions[0].nodes if node.module == "classifier" and node.role == "op"]
    assert classifier.colour.value == "high"


def test_a_half_checkpoint_gets_fp32_master_weights_and_says_so(tmp_path: Path):
    plain = bert().bfloat16()
    plain.save_pretrained(tmp_path)
    with pytest.warns(AmpRewriteWarning, match="would be loaded in bf16"):
        model = type(plain).from_pretrained(tmp_path, dtype="auto", quantization_config=ours.AmpRewriteConfig(dtype="bf16"))
    assert is_rewritten(model)
    assert_masters(model, plain)


def assert_masters(model: nn.Module, half: nn.Module) -> None:
    """The model holds, bit for bit, the values of a half checkpoint in fp32."""
    got = model.state_dict()
    for name, tensor in half.state_dict().items():
        want = tensor.float() if tensor.is_floating_point() else tensor
        assert got[name].dtype == want.dtype and torch.equal(got[name], want), name


def test_the_trainer_answers_a_half_checkpoint_as_rewrite_does(tmp_path: Path):
    settings = arguments(tmp_path, max_steps=2)
    with pytest.raises(PolicyError) as by_rewrite:
        amprewrite.rewrite(bert().bfloat16(), dtype="bf16")
    with pytest.raises(PolicyError) as by_trainer:
        transformers.Trainer(bert().bfloat16(), settings, callbacks=[ours.AmpRewriteCallback(dtype="bf16")])
    assert str(by_trainer.value) == str(by_rewrite.value) and "upcast=True" in str(by_rewrite.value)
    model, half = bert().bfloat16(), bert().bfloat16()
    options = ours.AmpRewriteCallback(dtype="bf16", upcast=True)
    trainer = transformers.Trainer(model, settings, train_dataset=Rows(), callbacks=[options])
    assert is_rewritten(model)
    assert_masters(model, half)
    trainer.train()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_such_a_model_trains_and_comes_back_plain(tmp_path: Path):
    bert().save_pretrained(tmp_path)
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path, quantization_config=ours.AmpRewriteConfig(dtype="fp16"))
    transformers.Trainer(model, arguments(tmp_path, max_steps=2), train_dataset=Rows()).train()
    assert model.loss_scale.report().steps == 2
    model.dequantize()
    assert not is_rewritten(model) and type(model) is transformers.BertForSequenceClassification
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_wrong_options_are_refused_when_the_config_is_made():
    for options, says in (
        ({"dtype": "int3"}, "int3"),
        ({"inplace": True}, "has no option 'inplace'"),
        ({"loss_scale": DynamicLossScale()}, "saved as JSON, which cannot say loss_scale"),
        ({"dtype": "bf16", "overrides": {"nothing:x": "fp32"}}, "nothing"),
    ):
        with pytest.raises(PolicyError, match=says):
            ours.AmpRewriteConfig(**options)
    assert ours.AmpRewriteConfig(dtype=torch.float16).options == {"dtype": "fp16"}


@pytest.mark.parametrize(("dtype", "kept"), [("fp16", {"wo", "strict"}), ("bf16", {"strict"})])
def test_modules_that_a_class_keeps_in_fp32_are_overrides(dtype: str, kept: set[str]):
    class Net(nn.Module):
        _keep_in_fp32_modules = ("wo",)
        _keep_in_fp32_modules_strict = ("strict",)

        def __init__(self) -> None:
            super().__init__()
            self.wo, self.strict, self.wow = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)

    assert {path.partition(".")[0] for path in ours.fp32_modules(Net(), narrow=dtype == "fp16")} == kept


def test_tensors_that_a_class_keeps_in_fp32_are_overrides_of_their_modules():
    class Router(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 4)
            self.register_buffer("score_bias", torch.zeros(4))

    class Net(nn.Module):
        _keep_in_fp32_modules_strict = ("gate.weight", "score_bias", "queries")

        def __init__(self) -> None:
            super().__init__()
            self.block, self.queries = nn.ModuleDict({"gate": nn.Linear(8, 4), "router": Router()}), nn.Parameter(torch.zeros(8))

    assert list(ours.fp32_modules(Net(), narrow=False)) == ["block.gate", "block.router"]


def test_t5_keeps_its_wo_in_fp32(tmp_path: Path):
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=40, decoder_start_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    options = ours.AmpRewriteConfig(dtype="fp16")
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, quantization_config=options).eval()
    model(input_ids=IDS, labels=IDS, use_cache=False)  # to make a cache, transformers copies the config, which torch 2.11 cannot capture
    reasons = {node.module: node.colour.value for region in model.plan.regions for node in region.nodes if node.op == "linear"}
    assert {colour for path, colour in reasons.items() if path.endswith(".wo")} == {"high"}, reasons
    assert {colour for path, colour in reasons.items() if path.endswith(".wi")} == {"low"}


# the callback ----------------------------------------------------------------------------------------------------------


def test_the_callback_rewrites_guards_logs_and_holds_the_schedule(tmp_path: Path):
    model = bert()
    callback = ours.AmpRewriteCallback(dtype="fp16", loss_scale=DynamicLossScale(init=2.0**22))
    args = arguments(tmp_path, lr_scheduler_type="linear", warmup_steps=0)
    trainer = transformers.Trainer(model, args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[callback])
    assert is_rewritten(model)
    trainer.train()
    logged = [each for each in trainer.state.log_history if "loss" in each]
    skipped = logged[-1]["skipped_steps"]
    assert 2 < skipped < 8 and logged[-1]["loss_scale"] == model.loss_scale.value
    taken = 8 - skipped
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(1e-3 * (1 - taken / 8))
    trainer.evaluate()
    assert trainer.predict(Rows()).predictions.dtype == "float32"


def test_a_model_that_model_init_makes_is_rewritten_too(tmp_path: Path):
    trainer = transformers.Trainer(
        model_init=bert, args=arguments(tmp_path, max_steps=2), train_dataset=Rows(), callbacks=[ours.AmpRewriteCallback(dtype="fp16")]
    )
    trainer.train()
    assert is_rewritten(trainer.model) and trainer.model.loss_scale.report().steps == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bf16": True}, r"bf16=False there, and AmpRewriteCallback\(dtype='bf16'\) here"),
        ({"torch_compile": True}, "torch_compile=False there"),
    ],
)
def test_a_precision_of_the_trainers_own_is_refused_by_name(tmp_path: Path, options: dict[str, Any], says: str):
    model = bert()
    with pytest.raises(PolicyError, match=says):
        transformers.Trainer(model, arguments(tmp_path, **options), train_dataset=Rows(), callbacks=[ours.AmpRewriteCallback()])
    assert not is_rewritten(model)


def test_lora_trains_and_merges(tmp_path: Path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(bert(), peft.LoraConfig(r=2, target_modules=["query", "value"]))
    trainer = transformers.Trainer(
        model, arguments(tmp_path, max_steps=3), train_dataset=Rows(), callbacks=[ours.AmpRewriteCallback(dtype="fp16")]
    )
    trainer.train()
    model.eval()
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        merged = model.merge_and_unload()
        after = merged(input_ids=IDS).logits
    assert (after - before).norm() < 1e-2 * before.norm()
    assert not any("lora" in name for name, _ in merged.named_parameters())
