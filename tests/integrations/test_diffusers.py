"""Networks and pipelines of the real diffusers: trained, adapted, averaged, sampled from."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import amprewrite

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def unet() -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        cross_attention_dim=16, attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def batch() -> dict[str, torch.Tensor]:
    data = torch.Generator().manual_seed(1)
    return {
        "sample": torch.randn(2, 4, 8, 8, generator=data),
        "timestep": torch.tensor([3, 700]),
        "encoder_hidden_states": torch.randn(2, 6, 16, generator=data),
    }


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@torch.no_grad()
def denoised(net: Any) -> torch.Tensor:
    found: torch.Tensor = net(**batch()).sample
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_network_trains_as_in_fp32_and_runs_whole(dtype: str) -> None:
    losses = {}
    for low in (False, True):
        net = unet().train()
        net = amprewrite.rewrite(net, dtype=dtype, strict=True) if low else net
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        found = losses[low] = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(**batch()).sample.square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    assert losses[True] == pytest.approx(losses[False], rel=2e-2)
    assert losses[False][2] < losses[False][0]


def test_averaged_weights_are_never_old() -> None:
    from diffusers.training_utils import EMAModel

    net = amprewrite.rewrite(unet(), dtype="bf16").eval()
    before, average = denoised(net), EMAModel(net.parameters(), decay=0.5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.3)
    trained = denoised(net)
    average.store(net.parameters())
    average.copy_to(net.parameters())
    assert torch.equal(denoised(net), before) and not torch.equal(trained, before)
    average.restore(net.parameters())
    assert torch.equal(denoised(net), trained)


def test_fused_and_unfused_adapters_are_never_old() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    plain = unet().eval()
    plain.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False))
    net = amprewrite.rewrite(copy.deepcopy(plain), dtype="bf16")
    first = denoised(net)
    for change in ("fuse_lora", "unfuse_lora", "disable_adapters", "enable_adapters"):
        for each in (plain, net):
            getattr(each, change)()
        assert error(denoised(net), denoised(plain)) < 3e-2, change
    assert torch.equal(denoised(net), first)


def stable_diffusion() -> Any:
    """The parts of a Stable Diffusion pipeline, as small as they get, with random weights."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), in_channels=3, out_channels=3, latent_channels=4, norm_num_groups=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    text = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=8,
            bos_token_id=0, eos_token_id=1, pad_token_id=1,
        )
    )  # fmt: skip
    return diffusers.StableDiffusionPipeline(
        vae=vae, text_encoder=text, tokenizer=None, unet=unet(), scheduler=diffusers.DDIMScheduler(clip_sample=False),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def pictures(pipeline: Any) -> torch.Tensor:
    data = torch.Generator().manual_seed(2)
    prompt, nothing = (torch.randn(1, 8, 16, generator=data) for _ in range(2))
    latents = torch.randn(1, 4, 8, 8, generator=data)
    pipeline.set_progress_bar_config(disable=True)
    found = pipeline(
        prompt_embeds=prompt, negative_prompt_embeds=nothing, latents=latents, height=16, width=16, num_inference_steps=4, output_type="pt"
    )
    images: torch.Tensor = found.images
    return images


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_pipeline_of_rewritten_networks_draws_the_same_picture(dtype: str) -> None:
    pipeline = stable_diffusion()
    want = pictures(pipeline)
    with warnings.catch_warnings():
        warnings.simplefilter("error", amprewrite.AmpRewriteWarning)
        for name in ("unet", "vae", "text_encoder"):
            amprewrite.rewrite(getattr(pipeline, name), dtype=dtype, inplace=True)
        got = pictures(pipeline)
        decoded = len(pipeline.vae.plan.regions)
    assert float((got - want).abs().max()) < (2e-2 if dtype == "bf16" else 4e-3)
    assert decoded, "vae.decode runs rewritten, though it is no forward"
    assert len(pipeline.unet.plan.regions) == 1, "one graph serves all steps"
