"""Configurations of transformers made small by the names of their fields. No model has a rule of its own."""

from __future__ import annotations

from typing import Any

import transformers
from sizes import DEPTH, EXPERTS, SIZES, WORDS


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
        half = SIZES.width // SIZES.heads // 2
        return kind([half - 2 * (half // 3), *[half // 3] * (len(value) - 1)])
    if "depth" in name or name.endswith(("layers", "layer_repeats", "num_blocks")):
        return kind([1] * len(value))
    if "heads" in name:
        return kind([min(each, SIZES.heads) for each in value])
    if any(word in name for word in ("hidden_sizes", "embed_dim", "channels", "dims", "widths", "conv_dim")):
        return kind([min(each, size) if each <= 4 else size for each, size in zip(value, _widths(value), strict=True)])
    if "image_size" in name:
        return kind([SIZES.image] * len(value))
    return None


def _widths(value: Any) -> list[int]:
    if len(set(value)) == 1:
        return [SIZES.width] * len(value)
    return [SIZES.width * 2 ** min(index, 2) for index in range(len(value))]


def _small_number(name: str, value: int, depth: int) -> int | None:
    """The small value of one field; None to leave it."""
    if name.endswith(("token_id", "_id", "_index", "token_index")):
        return min(value, WORDS - 1) if value > 2 else None
    if "vocab" in name:
        return min(value, WORDS) if value else None
    if name in ("n_group", "topk_group", "num_expert_group"):
        return 1
    if name == "num_groups":
        return min(value, SIZES.heads)
    for words, small in _rules():
        if any(word in name for word in words) and "group" not in name:
            return min(value, depth if small == DEPTH and "layers" in name else small)
    return None


def _rules() -> tuple[tuple[tuple[str, ...], int], ...]:
    """Words in the name of a field, and its small value: the first that fits counts."""
    return (
        (("image_size", "img_size", "input_size"), SIZES.image),
        (("patch_size",), SIZES.patch),
        (("experts_per_tok", "num_experts_per", "top_k", "topk", "moe_k"), 2),
        (("num_experts", "n_routed", "num_local_experts"), EXPERTS),
        (("head_dim", "rotary_dim", "qk_nope", "qk_rope", "v_head", "kv_channels", "d_kv", "head_size"), SIZES.width // SIZES.heads),
        (("num_key_value", "num_kv", "kv_heads", "multi_query"), SIZES.heads),
        (("heads", "n_head", "num_head"), SIZES.heads),
        (("layers", "n_layer", "num_blocks", "num_hidden", "depth"), DEPTH),
        (("intermediate", "ffn", "d_ff", "mlp_dim", "n_inner", "feedforward"), 2 * SIZES.width),
        (("lora_rank", "rank"), SIZES.width // 2),
        (("hidden", "d_model", "n_embd", "embed_dim", "embedding_size", "width", "projection_dim", "d_embed", "dim"), SIZES.width),
        (("num_queries", "max_position", "n_positions", "max_source", "max_target", "max_length"), 128),
    )
