"""Nets of other libraries at small sizes, rewritten and trained a step in fp16 and bf16, beside fp32 and torch.autocast.

    python examples/benchmarks/wall/libraries.py [--dtype bf16,fp16] [--out nets.jsonl] [--only diffusers] [--shard 0/4] [--html FILE]

    pip install diffusers monai torch-geometric segmentation-models-pytorch timm x-transformers mambapy

Diffusion, medical images, graphs, segmentation, decoders and a state space model. Nothing is downloaded, and no weights are loaded. A
library that is not installed is left out, and the table's title names those that are there. Nets for segmentation ask for torchvision and
need nothing of it: where it is missing, names that stand for its classes are imported. UnetPlusPlus takes some minutes on one core.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import stand_ins
import torch
from children import chosen, follow, parser, run_cases
from judging import GOOD, SECONDS, Given, asks_formats, formats, judge, seeds, show, warm_up
from torch import nn

Make = Callable[[Any], tuple[nn.Module, Given]]
"""Makes a net of a library, which it is given, and what its forward is given by keyword."""

PACKAGES = {
    "diffusers": "diffusers", "monai": "monai.networks.nets", "geometric": "torch_geometric.nn",
    "segmentation": "segmentation_models_pytorch", "x_transformers": "x_transformers", "mambapy": "mambapy.mamba",
}  # fmt: skip
"""The module of each library."""
ASKS_TORCHVISION = {"segmentation"}


# -- diffusion ---------------------------------------------------------------------------------------------------------
STEPS = torch.tensor([3, 700])
"""Time steps of a diffusion, one for each example."""


def noisy(channels: int, side: int, **more: Any) -> Given:
    return {"hidden_states": torch.randn(2, channels, side, side), "timestep": STEPS, **more}


def unet_2d(library: Any) -> tuple[nn.Module, Given]:
    net = library.UNet2DModel(
        sample_size=32, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return net, {"sample": torch.randn(2, 3, 32, 32), "timestep": STEPS}


def unet_by_text(library: Any) -> tuple[nn.Module, Given]:
    net = library.UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return net, {"sample": torch.randn(2, 4, 16, 16), "timestep": STEPS, "encoder_hidden_states": torch.randn(2, 7, 32)}


def autoencoder(library: Any) -> tuple[nn.Module, Given]:
    net = library.AutoencoderKL(
        block_out_channels=(32, 64), norm_num_groups=8, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return net, {"sample": torch.randn(2, 3, 32, 32)}


def dit(library: Any) -> tuple[nn.Module, Given]:
    net = library.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, num_embeds_ada_norm=1000,
        norm_num_groups=8,
    )  # fmt: skip
    return net, noisy(4, 8, class_labels=torch.tensor([1, 5]))


def pixart(library: Any) -> tuple[nn.Module, Given]:
    net = library.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=8, cross_attention_dim=32,
        caption_channels=24, norm_num_groups=8, use_additional_conditions=False,
    )  # fmt: skip
    return net, noisy(4, 8, encoder_hidden_states=torch.randn(2, 7, 24), added_cond_kwargs={"resolution": None, "aspect_ratio": None})


def sd3(library: Any) -> tuple[nn.Module, Given]:
    net = library.SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        caption_projection_dim=32, pooled_projection_dim=24,
    )  # fmt: skip
    return net, noisy(4, 8, encoder_hidden_states=torch.randn(2, 7, 32), pooled_projections=torch.randn(2, 24))


def flux(library: Any) -> tuple[nn.Module, Given]:
    net = library.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=24, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 7, 32), "timestep": torch.tensor([0.1, 0.7])}
    return net, {**given, "pooled_projections": torch.randn(2, 24), "img_ids": torch.rand(16, 3) * 4, "txt_ids": torch.zeros(7, 3)}


# -- images ------------------------------------------------------------------------------------------------------------
def of_image(name: str, dims: int = 2, side: int = 32, called: str = "x", **options: Any) -> Make:
    """A net of monai's for images of one channel, which its forward takes by the name `called`."""

    def make(library: Any) -> tuple[nn.Module, Given]:
        return getattr(library, name)(**options), {called: torch.randn(2, 1, *[side] * dims)}

    return make


def segments(name: str, encoder: str = "tu-resnet18") -> Make:
    def make(library: Any) -> tuple[nn.Module, Given]:
        return getattr(library, name)(encoder, encoder_weights=None, classes=3), {"x": torch.randn(2, 3, 128, 128)}

    return make


SEGMENTERS = ("Unet", "UnetPlusPlus", "FPN", "PSPNet", "DeepLabV3Plus", "Linknet", "MAnet", "PAN")
PLAIN = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}


# -- graphs ------------------------------------------------------------------------------------------------------------
def on_graph(name: str, **options: Any) -> Make:
    """A model of torch_geometric's, on a random graph of 40 nodes and 160 edges."""

    def make(library: Any) -> tuple[nn.Module, Given]:
        net = getattr(library.models, name)(in_channels=16, hidden_channels=32, num_layers=3, out_channels=7, **options)
        return net, {"x": torch.randn(40, 16), "edge_index": torch.randint(0, 40, (2, 160))}

    return make


GRAPHS = ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")


# -- sequences ---------------------------------------------------------------------------------------------------------
def decoder(**options: Any) -> Make:
    def make(library: Any) -> tuple[nn.Module, Given]:
        layers = library.Decoder(dim=64, depth=2, heads=2, attn_dim_head=32, **options)
        net = library.TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers)
        return net, {"x": torch.randint(0, 100, (2, 16))}

    return make


def mamba(library: Any) -> tuple[nn.Module, Given]:
    return library.Mamba(library.MambaConfig(d_model=32, n_layers=2)), {"x": torch.randn(2, 16, 32)}


NETS: dict[str, Make] = {
    "diffusers/UNet2DModel": unet_2d,
    "diffusers/UNet2DConditionModel": unet_by_text,
    "diffusers/AutoencoderKL": autoencoder,
    "diffusers/DiTTransformer2DModel": dit,
    "diffusers/PixArtTransformer2DModel": pixart,
    "diffusers/SD3Transformer2DModel": sd3,
    "diffusers/FluxTransformer2DModel": flux,
    "monai/UNet": of_image("UNet", **PLAIN, channels=(8, 16, 32), strides=(2, 2), num_res_units=1),
    "monai/AttentionUnet": of_image("AttentionUnet", **PLAIN, channels=(8, 16, 32), strides=(2, 2)),
    "monai/BasicUNet": of_image("BasicUNet", **PLAIN, features=(8, 8, 16, 16, 32, 8)),
    "monai/SegResNet": of_image("SegResNet", **PLAIN, init_filters=8),
    "monai/UNETR": of_image("UNETR", called="x_in", **PLAIN, img_size=32, feature_size=8, hidden_size=48, mlp_dim=96, num_heads=4),
    "monai/SwinUNETR": of_image("SwinUNETR", called="x_in", side=64, **PLAIN, feature_size=12),
    "monai/VNet": of_image("VNet", **PLAIN),
    "monai/AutoEncoder": of_image("AutoEncoder", **PLAIN, channels=(8, 16), strides=(2, 2)),
    "monai/DenseNet121": of_image("DenseNet121", **PLAIN),
    "monai/ViT": of_image(
        "ViT", in_channels=1, img_size=32, patch_size=8, spatial_dims=2, hidden_size=48, mlp_dim=96, num_layers=2, num_heads=4
    ),
    "monai/UNet of volumes": of_image(
        "UNet", 3, 16, spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1
    ),
    **{f"segmentation/{name}": segments(name) for name in SEGMENTERS},
    "segmentation/Segformer": segments("Segformer", "mit_b0"),
    **{f"geometric/{name}": on_graph(name) for name in GRAPHS},
    "geometric/GATv2": on_graph("GAT", v2=True, heads=4),
    "x_transformers/rotary": decoder(rotary_pos_emb=True),
    "x_transformers/alibi": decoder(alibi_pos_bias=True),
    "x_transformers/relative, gated": decoder(rel_pos_bias=True, ff_glu=True, ff_swish=True),
    "x_transformers/RMS norm, one kv head": decoder(use_rmsnorm=True, attn_kv_heads=1),
    "x_transformers/sandwich, qk norm": decoder(sandwich_norm=True, attn_qk_norm=True),
    "mambapy/Mamba": mamba,
}  # fmt: skip


def built(name: str) -> tuple[nn.Module, Given]:
    """A net in train mode, and what it is called with."""
    library = name.partition("/")[0]
    with stand_ins.lent() if library in ASKS_TORCHVISION else contextlib.nullcontext():
        module = importlib.import_module(PACKAGES[library])
    seeds(0)
    net, given = NETS[name](module)
    return net.float().train(), given


def main() -> None:
    options = parser(__doc__, SECONDS)
    asks_formats(options)
    asked = options.parse_args()
    there = [library for library, module in PACKAGES.items() if importlib.util.find_spec(module.partition(".")[0]) is not None]
    kept = chosen([name for name in NETS if name.partition("/")[0] in there], asked)
    warm_up()
    rows = follow(run_cases(kept, functools.partial(judge, built, formats(asked)), asked.out, asked.seconds), len(kept), GOOD)
    show(f"nets of {', '.join(there) or 'no library'}", rows, asked)


if __name__ == "__main__":
    main()
