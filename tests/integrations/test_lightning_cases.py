"""The cases of Lightning's own tests of its mixed precision, told of the plugin: clipping, fused optimizers, grad modes, lost batches."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from runtime_help import MLP, data
from torch import nn

from amprewrite import DynamicLossScale

lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install 'amprewrite[lightning]'")
plugin = pytest.importorskip("amprewrite.integrations.lightning")
from lightning.pytorch.demos.boring_classes import BoringModel  # noqa: E402
from lightning.pytorch.utilities import GradClipAlgorithmType  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::DeprecationWarning", "ignore::FutureWarning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_is_lightnings_own_and_takes_fused_optimizers(fused: bool):
    """Native mixed precision refuses to clip for an optimizer that unscales by itself; here gradients are unscaled already."""
    optimizer, precision = Mock(_step_supports_amp_scaling=fused), plugin.AmpRewritePrecision("fp16")
    precision.clip_grad_by_value, precision.clip_grad_by_norm = Mock(), Mock()
    precision.clip_gradients(optimizer)
    assert not precision.clip_grad_by_value.called and not precision.clip_grad_by_norm.called
    precision.clip_gradients(optimizer, clip_val=1.0, gradient_clip_algorithm=GradClipAlgorithmType.VALUE)
    assert precision.clip_grad_by_value.call_count == 1 and not precision.clip_grad_by_norm.called
    precision.clip_gradients(optimizer, clip_val=1.0, gradient_clip_algorithm=GradClipAlgorithmType.NORM)
    assert precision.clip_grad_by_value.call_count == 1 and precision.clip_grad_by_norm.call_count == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients_leaves_those_of_the_next_alone(dtype: str, mode: Any):
    """As autocast's cache of casts did not, which a `no_grad` call filled with copies that take no gradient."""
    precision = plugin.AmpRewritePrecision(dtype)
    layer = precision.convert_module(nn.Linear(2, 1))
    x = torch.randn(1, 2)
    grad_modes = torch.no_grad, torch.inference_mode
    with precision.forward_context():
        assert (torch.no_grad, torch.inference_mode) == grad_modes
        with mode():
            layer(x)
        loss = layer(x).mean()
        loss.backward()
    assert loss.grad_fn is not None and layer.weight.grad.dtype is torch.float32
    assert torch.allclose(layer.weight.grad, x, atol=1e-2)


def fit(model: Any, precision: Any, **options: Any) -> Any:
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=5, limit_val_batches=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=[precision], **options,
    )  # fmt: skip
    trainer.fit(model)
    return model


def test_fused_and_plain_adam_end_at_the_same_weights():
    class Parity(BoringModel):
        fused = False

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1.0, fused=self.fused)

    ends = []
    for fused in (False, True):
        lightning.seed_everything(1234)
        model = Parity()
        model.fused = fused
        ends.append([p.detach() for p in fit(model, plugin.AmpRewritePrecision("fp16")).parameters()])
    for plain, fused in zip(*ends, strict=True):
        torch.testing.assert_close(plain, fused)


def test_a_batch_without_a_loss_moves_no_scale():
    class Skips(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    model = fit(Skips(), plugin.AmpRewritePrecision("fp16", loss_scale=DynamicLossScale(init=2.0**8)), gradient_clip_val=0.5)
    assert (model.loss_scale.report().steps, model.loss_scale.report().skipped) == (3, 0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_parameters_gradients_and_results_stay_fp32(dtype: str):
    precision = plugin.AmpRewritePrecision(dtype)
    net = precision.convert_module(MLP())
    result = net(data())
    result.sum().backward()
    assert {each.dtype for each in (result, *net.parameters(), *(p.grad for p in net.parameters()))} == {torch.float32}
    assert precision.precision == "32-true" and net.plan.low == dtype
