"""Configurations of transformers made small by the names of their fields, and inputs made for what a forward asks for by name.

No model has a rule of its own. A forward that has several ways to be called is tried with each until fp32 runs one.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

WIDTH, DEPTH, HEADS, WORDS, IMAGE, PATCH, LENGTH = 64, 2, 4, 96, 32, 8, 12
BATCH = 2


# -- sizes -----------------------------------------------------------------------------------
def shrink(config: Any, level: int = 0) -> Any:
    """Make a configuration small by the names of its fields, parts included."""
    kinds = getattr(config, "layer_types", None)
    kinds = list(dict.fromkeys(kinds)) if isinstance(kinds, list | tuple) else []  # one layer of each kind, in their order
    depth = max(DEPTH, len(kinds))
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig) and level < 4:
            shrink(value, level + 1)
            continue
        small = _small(name.lower(), value, depth)
        if name == "layer_types" and kinds:
            small = (kinds * DEPTH)[:depth]
        if small is not None and small != value:
            try:
                setattr(config, name, small)
            except Exception:  # a field that refuses to be set keeps its size
                continue
    return config


def _small(name: str, value: Any, depth: int) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return None
    if isinstance(value, dict):
        return _small_dict(value, depth)
    if isinstance(value, float):
        return 0.0 if "drop" in name else None
    if isinstance(value, list | tuple):
        return _small_list(name, value, depth)
    if not isinstance(value, int):
        return None
    return _small_number(name, value, depth)


def _small_dict(value: dict[Any, Any], depth: int) -> dict[Any, Any]:
    """The dict with its fields made small; sections of a rotary embedding share half of a head."""
    return {key: new if (new := _small(str(key).lower(), each, depth)) is not None else each for key, each in value.items()}


def _small_list(name: str, value: Any, depth: int) -> Any:
    if not value or not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        return None
    kind = type(value)
    if name.endswith(("indices", "idxs", "index", "layer_ids", "only_layers", "indexes")) and "out_" not in name:
        return kind([each for each in value if each < depth] or [depth - 1])
    if name == "mrope_section":
        half = WIDTH // HEADS // 2
        return kind([half - 2 * (half // 3), *[half // 3] * (len(value) - 1)])
    if "depth" in name or name.endswith(("layers", "layer_repeats", "num_blocks")):
        return kind([1] * len(value))
    if "heads" in name:
        return kind([min(each, HEADS) for each in value])
    if any(word in name for word in ("hidden_sizes", "embed_dim", "channels", "dims", "widths", "conv_dim")):
        return kind([min(each, size) if each <= 4 else size for each, size in zip(value, _widths(value), strict=True)])
    if "image_size" in name:
        return kind([IMAGE] * len(value))
    return None


def _widths(value: Any) -> list[int]:
    if len(set(value)) == 1:
        return [WIDTH] * len(value)
    return [WIDTH * 2 ** min(index, 2) for index in range(len(value))]


def _small_number(name: str, value: int, depth: int) -> int | None:
    """The small value of one field; None to leave it."""
    if name.endswith(("token_id", "_id", "_index", "token_index")):
        return min(value, WORDS - 1) if value > 2 else None
    if "vocab" in name:
        return min(value, WORDS) if value else None
    if name in ("n_group", "topk_group", "num_expert_group"):
        return 1
    if name == "num_groups":
        return min(value, HEADS)
    for words, small in _RULES:
        if any(word in name for word in words) and "group" not in name:
            return min(value, depth if small == DEPTH and "layers" in name else small)
    return None


_RULES: tuple[tuple[tuple[str, ...], int], ...] = (
    (("image_size", "img_size", "input_size"), IMAGE),
    (("patch_size",), PATCH),
    (("experts_per_tok", "num_experts_per", "top_k", "topk", "moe_k"), 2),
    (("num_experts", "n_routed", "num_local_experts"), 4),
    (("head_dim", "rotary_dim", "qk_nope", "qk_rope", "v_head", "kv_channels", "d_kv", "head_size"), WIDTH // HEADS),
    (("num_key_value", "num_kv", "kv_heads", "multi_query"), HEADS),
    (("heads", "n_head", "num_head"), HEADS),
    (("layers", "n_layer", "num_blocks", "num_hidden", "depth"), DEPTH),
    (("intermediate", "ffn", "d_ff", "mlp_dim", "n_inner", "feedforward"), 2 * WIDTH),
    (("lora_rank", "rank"), WIDTH // 2),
    (("hidden", "d_model", "n_embd", "embed_dim", "embedding_size", "width", "projection_dim", "d_embed", "dim"), WIDTH),
    (("num_queries", "max_position", "n_positions", "max_source", "max_target", "max_length"), 128),
)


# -- inputs ----------------------------------------------------------------------------------
def inputs(model: nn.Module) -> dict[str, Tensor]:
    """The first way to call a model by keyword that fp32 runs.

    Raises:
        ValueError: no way is known for what its forward asks for by name
        Exception: what the first way raised, if none ran
    """
    problems: list[Exception] = []
    for given in ways(model):
        for filled in (given, None):
            if filled is None:
                told = _TOKENS.search(str(problems[-1]))
                filled = _with_image_tokens(model.config, given, int(told[1])) if told else None
                if filled is None:
                    break
            try:
                with torch.no_grad():
                    model(**filled)
                return filled
            except Exception as problem:  # the next way may run
                problems.append(problem)
    if problems:
        raise problems[0]
    raise ValueError(f"no inputs are known for forward({', '.join(inspect.signature(model.forward).parameters)})")


_TOKENS = re.compile(r"tokens:? \d+, features:? (\d+)")


def _with_image_tokens(config: Any, given: dict[str, Tensor], features: int) -> dict[str, Tensor] | None:
    """The words with as many image tokens in front of each row as its error asks for."""
    token = _first(config, ("image_token_id", "image_token_index"), -1)
    if token < 0 or "input_ids" not in given or features % BATCH:
        return None
    marks = torch.full((BATCH, features // BATCH), token)
    ids = torch.cat([given["input_ids"][:, :1], marks, given["input_ids"][:, 1:]], 1)
    masks = {"attention_mask": torch.ones_like(ids)} if "attention_mask" in given else {}
    return {**given, "input_ids": ids, **masks}


def ways(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Inputs by keyword, the fullest first: every shape that is known for a name, then text alone where there is text."""
    named = inspect.signature(model.forward).parameters
    known = {name: shapes for name, shapes in _known(model.config, "input_ids" in named).items() if name in named}
    if not known:
        return
    tried = itertools.product(*([(name, shape) for shape in shapes] for name, shapes in known.items()))
    for each in itertools.islice(tried, 12):
        yield dict(each)
    text = {name: shapes[0] for name, shapes in known.items() if name in ("input_ids", "attention_mask", "decoder_input_ids", "bbox")}
    if text and len(text) < len(known):
        yield text


def _known(config: Any, words: bool) -> dict[str, list[Tensor]]:
    """The inputs a forward may ask for by name, each in the shapes that are common."""
    size = _first(config, ("image_size", "img_size"), IMAGE)
    size = size if isinstance(size, int) else IMAGE
    channels = _first(config, ("num_channels", "in_channels"), 3)
    channels = channels if isinstance(channels, int) else 3
    width = _first(config, ("hidden_size", "d_model"), WIDTH)
    bins = _first(config, ("num_mel_bins", "input_channels", "feature_size", "mel_bins"), 80)
    bins = bins if isinstance(bins, int) else 80
    frames = 2 * _first(config, ("max_source_positions",), 32)
    ids = torch.randint(3, max(4, _first(config, ("vocab_size",), WORDS) - 1), (BATCH, LENGTH))
    grid = torch.tensor([[1, 4, 4]] * BATCH)
    patch = _first(config, ("patch_size",), PATCH)
    patch = patch if isinstance(patch, int) else PATCH
    patches = torch.randn(BATCH * 16, channels * _first(config, ("temporal_patch_size",), 1) * patch**2)
    known: dict[str, list[Tensor]] = {
        "input_ids": [ids],
        "attention_mask": [torch.ones_like(ids)] if words else [],
        "bbox": [torch.randint(0, 20, (BATCH, LENGTH, _first(config, ("dim_bbox",), 4))).sort(-1)[0]],
        "pixel_values": [torch.randn(BATCH, channels, size, size), torch.randn(BATCH, 2, channels, size, size)],
        "pixel_values_videos": [] if words else [torch.randn(BATCH, 4, channels, size, size)],
        "past_values": [
            torch.randn(BATCH, _first(config, ("context_length", "prediction_length"), 32), _first(config, ("num_input_channels",), 1))
        ],
        "query_embeds": [torch.randn(BATCH, 8, width)],
        "encoder_hidden_states": [torch.randn(BATCH, 5, _first(config, ("encoder_hidden_size",), width))],
        "decoder_input_ids": [ids[:, : LENGTH // 2]],
    }
    if not words:
        known["input_values"] = [torch.randn(BATCH, 4000), torch.randn(BATCH, 1, 4000), torch.randn(BATCH, frames, bins)]
        known["input_features"] = [torch.randn(BATCH, bins, frames), torch.randn(BATCH, frames, bins), torch.randn(BATCH, 1, frames, bins)]
        known["hidden_states"] = [patches, torch.randn(BATCH, LENGTH, width)]
        known["grid_thw"] = [grid]
        known["inputs_embeds"] = [torch.randn(BATCH, LENGTH, width)]
    return {name: shapes for name, shapes in known.items() if shapes}


def _first(config: Any, names: tuple[str, ...], default: int) -> Any:
    """A field of a configuration, or of the first part that has it."""
    parts = [config, *(part for part in vars(config).values() if isinstance(part, transformers.PretrainedConfig))]
    return next((getattr(part, name) for part in parts for name in names if getattr(part, name, None)), default)
