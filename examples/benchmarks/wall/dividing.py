"""Configurations of transformers made small by dividing all their widths by one number.

Widths hang together in ways that names do not tell. Divided by the same number, they go on fitting as their authors chose them: either
each head becomes narrower, or there are fewer heads. Sizes of kernels and patches stay. Layers, experts and words become few, and images
small. Fields without a value that a model of their name cannot do without get one.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any

import transformers
from sizes import DEPTH, EXPERTS, SIZES, WORDS

LARGEST_IMAGE = 256
"""Pixels of a side above which an image is halved: attention over all patches of a larger one takes too much memory."""
SHORT = 8
"""A window or a forecast where a configuration names none."""

_WIDTHS = re.compile(
    r"dims?(_|$)|(^|_)(d|dim)_|(^|_)(hidden|features?|channels?|width|widths|filters|inner|rank|planes|embed\w*|embd)(_|$)"
    r"|intermediate|ffn|feedforward|(projection|head|state|feature|coordinate|shape|reduction)_size|mrope_section|bottleneck|embds|kv_channels"
)
_COUNTED = re.compile(
    r"^(num|n)_(?!embd|inner|filters)|^(max|min|use|is)_|_(ratio|factor|scale|type|strides?|layers|eps|std|bias|range|act)(_|$)"
    r"|kernel|multiplier|per_channel|num_attention"
)
_DEPTHS = re.compile(r"(^|_)(layers|layer|depths?|blocks|repeats)($|_per_|_list$|_in_)|_layers_?|block_num|depth$")
_IMAGES = re.compile(r"(^|_)(image|img|input|frame)_size")
_PLACES = ("indices", "idxs", "index", "layer_ids", "only_layers", "indexes")
_HEADS = re.compile(r"heads|(^|_)n_head")
_OF_A_HEAD = re.compile(r"head_dim|head_size|d_head|d_kv|qk_|v_head|rotary_dim|rope_dim|mrope_section|kv_channels")


@dataclass(frozen=True)
class Division:
    """By what widths are divided, and whether heads become fewer and not narrower."""

    by: int
    heads: bool = False

    def __call__(self, config: Any, level: int = 0) -> Any:
        """Make a configuration small, parts included."""
        kinds = getattr(config, "layer_types", None)
        kinds = list(dict.fromkeys(kinds)) if isinstance(kinds, list | tuple) else []  # one layer of each kind, in their order
        fields = dict(vars(config))
        lengths = {len(each) for each in fields.values() if isinstance(each, list | tuple)}
        sizes = Sizes(max(DEPTH, len(kinds)), _layers(fields), lengths, fields.get("hidden_size", 0))
        for name, value in fields.items():
            if isinstance(value, transformers.PretrainedConfig) and level < 4:
                self(value, level + 1)
                continue
            small = (kinds * DEPTH)[: sizes.depth] if name == "layer_types" and kinds else self._field(name.lower(), value, sizes)
            if small != value:
                with contextlib.suppress(Exception):  # a field that refuses to be set keeps its size
                    setattr(config, name, small)
        _fill(config, sizes.depth)
        return config

    def _field(self, name: str, value: Any, sizes: Sizes) -> Any:
        if isinstance(value, bool):
            return value and name not in ("use_cache", "use_pretrained_backbone")
        if isinstance(value, dict):
            return {key: self._field(str(key).lower(), each, sizes) for key, each in value.items()}
        if isinstance(value, float):
            return 0.0 if "drop" in name else value
        if isinstance(value, list | tuple):
            return self._list(name, value, sizes)
        return self._number(name, value, sizes) if isinstance(value, int) else value

    def _list(self, name: str, value: Any, sizes: Sizes) -> Any:
        kind = type(value)
        whole = all(isinstance(each, int) and not isinstance(each, bool) for each in value)
        if whole and name.endswith(_PLACES) and "out_" not in name:
            return kind([each for each in value if each < sizes.depth] or [sizes.depth - 1][: len(value)])
        if len(value) == sizes.layers:
            return kind(value[: sizes.depth])  # an entry for each layer
        if whole and _DEPTHS.search(name):
            return kind(min(each, 1) for each in value)
        return kind(self._field(name, each, sizes) for each in value)

    def _number(self, name: str, value: int, sizes: Sizes) -> int:
        if name.endswith(("token_id", "_id", "_index")):
            return min(value, WORDS - 1)
        for words, most in _MOST:
            if any(word in name for word in words):
                return min(value, most)
        if _IMAGES.search(name):
            while value > max(LARGEST_IMAGE, SIZES.image) and value % 2 == 0:
                value //= 2
            return value
        if _DEPTHS.search(name) and not _OF_KERNELS.search(name):
            return value if value in sizes.lengths and value != sizes.layers else min(value, sizes.depth)
        if not self._divides(name) and not ("groups" in name and value == sizes.width):
            return value
        if "intermediate" in name and value > 64 * self.by:
            return value // self.by // 8 * 8  # nothing hangs on it, and products of groups ask for multiples of 8
        return value // self.by if value >= self.by and value % self.by == 0 else value

    def _divides(self, name: str) -> bool:
        if self.heads and (_HEADS.search(name) or _OF_A_HEAD.search(name)):
            return _HEADS.search(name) is not None
        return _WIDTHS.search(name) is not None and _COUNTED.search(name) is None


@dataclass(frozen=True)
class Sizes:
    """How many layers a configuration shall have and has, its width, and the lengths of its lists: what counts their entries stays."""

    depth: int
    layers: int
    lengths: set[int]
    width: int


_OF_KERNELS = re.compile("kernel|divisor|multiplier|wise")
_MOST: tuple[tuple[tuple[str, ...], int], ...] = (
    (("vocab",), WORDS),
    (("shared_layers",), 0),
    (("n_group", "topk_group", "num_expert_group"), 1),
    (("experts_per_tok", "num_experts_per", "top_k", "topk", "moe_k"), 2),
    (("num_experts", "n_routed", "num_local_experts"), EXPERTS),
    (("max_position_embeddings", "n_positions"), 1024),
)


def _layers(fields: dict[str, Any]) -> int:
    """How many layers there are; 0 for few, whose number may be that of the stages."""
    found = next((fields[name] for name in ("num_hidden_layers", "num_layers", "n_layer") if fields.get(name)), 0)
    return found if isinstance(found, int) and found > 5 else 0


def _fill(config: Any, depth: int) -> None:
    """Give fields that have no value one where their name tells which."""
    wide, heads = _has(config, "hidden_size"), _has(config, "num_attention_heads")
    many = isinstance(wide, int) and isinstance(heads, int)
    values = {
        "layer_types": ["full_attention"] * depth, "mlp_layer_types": (["dense", "sparse"] * depth)[:depth],
        "head_dim": wide // heads if many else None, "num_key_value_heads": heads, "vocab_size": WORDS, "vocabulary_map": {},
        "image_token_id": WORDS - 1, "image_token_index": WORDS - 1, "pad_token_id": 1, "architectures": [],
        "num_experts": EXPERTS, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1,
        "n_shared_experts": 1, "moe_intermediate_size": wide, "sliding_window": SHORT, "prediction_length": SHORT, "context_length": SHORT,
    }  # fmt: skip
    for name, value in values.items():
        if _has(config, name, 0) is None:
            with contextlib.suppress(Exception):  # a field that refuses to be set keeps having none
                setattr(config, name, value)
    rope = _has(config, "rope_parameters")
    if many and isinstance(rope, dict) and "rope_type" in rope and rope.get("mrope_section") is None:
        half = int((_has(config, "head_dim") or wide // heads) * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]  # what models take without it fits their own heads alone
    if _has(config, "image_embedding_size") and _has(config, "patch_size"):
        config.image_embedding_size = config.image_size // config.patch_size


def _has(config: Any, name: str, otherwise: Any = None) -> Any:
    """A field of a configuration, or `otherwise` where it has none that all layers share."""
    try:
        return getattr(config, name, otherwise)
    except Exception:  # a field may have a value for each layer
        return otherwise
