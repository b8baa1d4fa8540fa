"""Inputs made for what a forward asks for by name.

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
from judging import seeds
from sizes import SIZES, WORDS
from torch import Tensor, nn


def inputs(model: nn.Module) -> dict[str, Tensor]:
    """The first way to call a model by keyword that fp32 runs.

    Raises:
        ValueError: no way is known for what its forward asks for by name
        Exception: what the first way raised, if none ran
    """
    problems: list[Exception] = []
    for widths in (False, True):
        seeds(2)
        for given in ways(model):
            filled = _completed(model, given, widths, problems)
            if filled is not None:
                return _with_masks_that_fit(model, filled)
    if problems:
        raise problems[0]
    raise ValueError(f"no inputs are known for forward({', '.join(inspect.signature(model.forward).parameters)})")


def _with_masks_that_fit(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs without an `attention_mask` of another size: eager code lets one of ones alone pass unread, captured code reads it."""
    mask = given.get("attention_mask")
    if mask is None or mask.dim() != 2 or not bool(mask.all()):
        return given
    hiding = mask.clone()
    hiding[:, -1] = 0
    unmasked = {name: each for name, each in given.items() if name != "attention_mask"}
    return given if _runs(model, {**given, "attention_mask": hiding}) or not _runs(model, unmasked) else unmasked


def _runs(model: nn.Module, given: dict[str, Tensor]) -> bool:
    try:
        with torch.no_grad():
            model(**given)
    except Exception:  # whatever a model raises of what it is not made for
        return False
    return True


def _completed(model: nn.Module, given: dict[str, Tensor], widths: bool, problems: list[Exception]) -> dict[str, Tensor] | None:
    """The inputs, with what errors say that they lack, if fp32 runs them; else None, and what was raised is added to `problems`."""
    filled: dict[str, Tensor] | None = given
    for _ in range(3):
        if filled is None:
            break
        try:
            with torch.no_grad():
                model(**filled)
            return filled
        except Exception as problem:  # what it says may help
            problems.append(problem)
        filled = _as_told(model, filled, str(problems[-1]), widths)
    return None


_TOKENS = re.compile(r"tokens:? \d+, features:? (\d+)")
_FACTORS = re.compile(r"cannot be multiplied \(\d+x(\d+) and (\d+)x")
_ADDED = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
_NORMED = re.compile(r"normalized_shape=\[(\d+)\].*size\[[\d, ]*?(\d+)\]")


def _as_told(model: nn.Module, given: dict[str, Tensor], why: str, widths: bool) -> dict[str, Tensor] | None:
    """The inputs with what an error says that they lack: tokens that stand for an image, or, if asked, a width. None if it says neither."""
    if told := _TOKENS.search(why):
        return _with_image_tokens(model, given, int(told[1]))
    if widths and (told := _FACTORS.search(why)):
        return _with_width(given, int(told[1]), int(told[2]))
    if widths and (told := _NORMED.search(why)):
        return _with_width(given, int(told[2]), int(told[1]))
    if widths and (told := _ADDED.search(why)):
        return _with_width(given, int(told[1]), int(told[2]))
    return None


def _with_width(given: dict[str, Tensor], had: int, asked: int) -> dict[str, Tensor] | None:
    """The inputs, those of one width with another one."""
    wrong = {name: each for name, each in given.items() if each.is_floating_point() and each.dim() > 1 and each.shape[-1] == had}
    return {**given, **{name: torch.randn(*each.shape[:-1], asked) for name, each in wrong.items()}} if wrong and had != asked else None


def _with_image_tokens(model: nn.Module, given: dict[str, Tensor], features: int) -> dict[str, Tensor] | None:
    """The words with as many image tokens in front of each row as its error asks for."""
    token = _first(model.config, ("image_token_id", "image_token_index"), -1)
    if token < 0 or "input_ids" not in given or features % SIZES.batch:
        return None
    marks = torch.full((SIZES.batch, features // SIZES.batch), token)
    ids = torch.cat([given["input_ids"][:, :1], marks, given["input_ids"][:, 1:]], 1)
    masks = {"attention_mask": torch.ones_like(ids)} if "attention_mask" in given else {}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters and "image_grid_thw" in given:
        masks["mm_token_type_ids"] = (ids == token).long()
    return {**given, "input_ids": ids, **masks}


def ways(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Inputs by keyword: every shape that is known for a name, then text alone where there is text, then what goes together."""
    named = inspect.signature(model.forward).parameters
    known = {name: shapes for name, shapes in _known(model.config, "input_ids" in named).items() if name in named}
    tried = itertools.product(*([(name, shape) for shape in shapes] for name, shapes in known.items()))
    for each in itertools.islice(tried, 12 if known else 0):
        yield dict(each)
    text = {name: shapes[0] for name, shapes in known.items() if name in ("input_ids", "attention_mask", "decoder_input_ids", "bbox")}
    if text and len(text) < len(known):
        yield text
    first = {name: shapes[0] for name, shapes in known.items() if name != "inputs_embeds"}  # instead of the main input, never beside it
    needed = {name for name, each in named.items() if each.default is each.empty and each.kind is not each.VAR_KEYWORD}
    for together in _together(model.config, "input_ids" in named):
        given = {name: each for name, each in {**first, **together}.items() if name in named}
        yield given
        yield {name: each for name, each in given.items() if name in needed or name in text or name.endswith("token_type_ids")}


def _together(config: Any, words: bool) -> Iterator[dict[str, Tensor]]:
    """Inputs of several names whose shapes hang together, each with everything else that a forward may need by name."""
    needs = _needs(config)
    for each in (*_pictures(config), *_sounds(config)):
        yield {**needs, **each}


def _pictures(config: Any) -> Iterator[dict[str, Tensor]]:
    """Images: as rows of patches one behind the other, as padded rows of patches, and as videos."""
    batch, length = SIZES.batch, SIZES.length
    size = _whole(config, ("image_size", "img_size", "input_size"), SIZES.image)
    channels, patch = _whole(config, ("num_channels", "in_channels", "in_chans"), 3), _whole(config, ("patch_size",), SIZES.patch)
    depth, side = _whole(config, ("temporal_patch_size",), 1), 4
    grid = torch.tensor([[1, side, side]] * batch)
    values = channels * patch**2
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(batch, -1, -1)
    packed = {"grid_thw": grid, "image_grid_thw": grid, "merge_sizes": torch.tensor([_whole(config, ("spatial_merge_size",), 2)] * batch)}
    yield {"pixel_values": torch.randn(batch * side**2, depth * values), **packed}
    yield {"pixel_values": torch.randn(batch * side**2, channels, patch, patch), **packed}
    yield {"pixel_values": torch.randn(batch * side**2, channels, depth, patch, patch), **packed}
    yield {"pixel_values": torch.randn(batch * side**2, depth, channels, patch, patch), **packed}
    yield {
        "pixel_values": torch.randn(batch, side**2, values),
        "pixel_attention_mask": torch.ones(batch, side**2, dtype=torch.long),
        "spatial_shapes": torch.tensor([[side, side]] * batch),
        "pixel_position_ids": places,
    }
    yield {"pixel_values": torch.randn(batch, channels, patch, side**2 * patch), "target_sizes": torch.tensor([[side, side]] * batch)}
    frames = _whole(config, ("num_frames", "num_frame"), 4)
    video = torch.randn(batch, frames, channels, size, size)
    seen = torch.ones(batch, frames, dtype=torch.bool)
    yield {"pixel_values": video, "pixel_values_videos": video, "pixel_attention_mask": seen}
    yield {"pixel_values": video[:, :2], "image_attention_mask": torch.ones(batch, length, 2, dtype=torch.long)}
    yield {"pixel_values": torch.randn(1, batch * side**2, channels, patch, patch), **packed}
    yield {"pixel_values": torch.randn(batch, channels, 4 * SIZES.image, 4 * SIZES.image)}
    yield {"pixel_values": torch.randn(batch, channels, size, size), "pixel_values_videos": video}


def _sounds(config: Any) -> Iterator[dict[str, Tensor]]:
    """Sounds: spectra with time last and with time first, and waves."""
    batch, length = SIZES.batch, SIZES.length
    bins = _whole(config, ("num_mel_bins", "input_feat_size", "feature_size", "mel_bins", "input_dim", "feature_projection_input_dim"), 80)
    frames, wide = 2 * _whole(config, ("max_source_positions",), 32), _whole(config, ("hidden_size", "d_model"), SIZES.width)
    mask = torch.ones(batch, frames, dtype=torch.long)
    wave = torch.randn(batch, 1, SIZES.sound // 1920 * 1920)  # many strides divide it
    yield {"input_features": torch.randn(batch, bins, frames), "input_features_mask": mask, "input_values": wave, "hidden_states": wave}
    yield {"input_features": torch.randn(batch, 1, frames, bins), "is_longer": torch.zeros(batch, 1, dtype=torch.bool)}
    turned = {"input_features": torch.randn(batch, frames, bins), "input_features_mask": mask, "input_values": wave}
    yield turned
    yield {**turned, "attention_mask": mask.bool(), "latents": torch.randn(batch, 12, wide)}
    yield {"audio_mel": turned["input_features"], "audio_mel_mask": mask == 0}
    long = _whole(config, ("max_length",), frames)
    yield {"input_values": torch.randn(batch, long, bins), "attention_mask": mask, "latents": torch.randn(batch, wide, 12)}
    yield {"input_values": wave[:, 0], "decoder_input_values": torch.randn(batch, 6, bins)}
    books = _whole(config, ("num_codebooks", "num_channels"), 9)
    codes = torch.randint(3, WORDS - 1, (batch, length, books + 1))
    yield {"input_ids": codes}
    yield {"input_ids": codes[..., :-1]}
    yield {"decoder_input_ids": codes[..., :-1]}


def _needs(config: Any) -> dict[str, Tensor]:
    """What some forwards ask for beside their main input, by name."""
    batch, length = SIZES.batch, SIZES.length
    size = _whole(config, ("image_size", "img_size", "input_size"), SIZES.image)
    wide = _whole(config, ("hidden_size", "d_model"), SIZES.width)
    past = _whole(config, ("context_length", "prediction_length"), 32) + max([0, *(_first(config, ("lags_sequence",), [0]))])
    ids = torch.randint(3, max(4, _first(config, ("vocab_size",), WORDS) - 1), (batch, length))
    image = torch.randn(batch, 3, size, size)
    coming = _whole(config, ("prediction_length",), 8)
    marks = _whole(config, ("num_time_features",), 1)
    return {
        "input_ids": ids,
        "qformer_input_ids": ids,
        "mm_token_type_ids": torch.zeros_like(ids),
        "lang_ids": torch.zeros(batch, dtype=torch.long),
        "duration_labels": torch.ones_like(ids),
        "pitch_labels": torch.randn(batch, length, 1),
        "energy_labels": torch.randn(batch, length, 1),
        "spectrogram_labels": torch.randn(batch, length, _whole(config, ("num_mel_bins",), 80)),
        "task_inputs": torch.randint(3, WORDS - 1, (batch, _whole(config, ("task_seq_len",), length))),
        "prompt_pixel_values": image,
        "prompt_masks": torch.randn(batch, 3, size, size),
        "action_embeds": torch.randn(batch, 4, wide),
        "noise_embeds": torch.randn(batch, 4, wide),
        "context_hidden_states": torch.randn(batch, length, wide),
        "inputs": torch.randn(batch, length, wide),
        "past_values": torch.randn(batch, past),
        "past_values_padding": torch.zeros(batch, past, dtype=torch.long),
        "freq": torch.zeros(batch, 1, dtype=torch.long),
        "past_time_features": torch.randn(batch, past, marks),
        "past_observed_mask": torch.ones(batch, past),
        "future_values": torch.randn(batch, coming),
        "future_time_features": torch.randn(batch, coming, marks),
        "states": torch.randn(batch, length, _whole(config, ("state_dim",), 17)),
        "actions": torch.randn(batch, length, _whole(config, ("act_dim",), 4)),
        "rewards": torch.randn(batch, length, 1),
        "returns_to_go": torch.randn(batch, length, 1),
        "timesteps": torch.arange(length).expand(batch, -1),
        "visual_feats": torch.randn(batch, 5, _whole(config, ("visual_feat_dim",), wide)),
        "visual_pos": torch.rand(batch, 5, _whole(config, ("visual_pos_dim",), 4)),
    }


def _whole(config: Any, names: tuple[str, ...], default: int) -> int:
    """A whole number of a configuration; the first of a list, and the default for anything else."""
    found = _first(config, names, default)
    found = found[0] if isinstance(found, list | tuple) and found else found
    return found if isinstance(found, int) else default


def _known(config: Any, words: bool) -> dict[str, list[Tensor]]:
    """The inputs a forward may ask for by name, each in the shapes that are common."""
    batch, length = SIZES.batch, SIZES.length
    size = _first(config, ("image_size", "img_size"), SIZES.image)
    size = size if isinstance(size, int) else SIZES.image
    channels = _first(config, ("num_channels", "in_channels"), 3)
    channels = channels if isinstance(channels, int) else 3
    width = _first(config, ("hidden_size", "d_model"), SIZES.width)
    bins = _first(config, ("num_mel_bins", "input_channels", "feature_size", "mel_bins"), 80)
    bins = bins if isinstance(bins, int) else 80
    frames = 2 * _first(config, ("max_source_positions",), 32)
    ids = torch.randint(3, max(4, _first(config, ("vocab_size",), WORDS) - 1), (batch, length))
    grid = torch.tensor([[1, 4, 4]] * batch)
    patch = _first(config, ("patch_size",), SIZES.patch)
    patch = patch if isinstance(patch, int) else SIZES.patch
    patches = torch.randn(batch * 16, channels * _first(config, ("temporal_patch_size",), 1) * patch**2)
    known: dict[str, list[Tensor]] = {
        "input_ids": [ids],
        "attention_mask": [torch.ones_like(ids)] if words else [],
        "bbox": [torch.randint(0, 20, (batch, length, _first(config, ("dim_bbox",), 4))).sort(-1)[0]],
        "pixel_values": [torch.randn(batch, channels, size, size), torch.randn(batch, 2, channels, size, size)],
        "pixel_values_videos": [] if words else [torch.randn(batch, 4, channels, size, size)],
        "past_values": [
            torch.randn(batch, _first(config, ("context_length", "prediction_length"), 32), _first(config, ("num_input_channels",), 1))
        ],
        "query_embeds": [torch.randn(batch, 8, width)],
        "encoder_hidden_states": [torch.randn(batch, 5, _first(config, ("encoder_hidden_size",), width))],
        "decoder_input_ids": [ids[:, : length // 2]],
    }
    if not words:
        known["input_values"] = [torch.randn(batch, SIZES.sound), torch.randn(batch, 1, SIZES.sound), torch.randn(batch, frames, bins)]
        known["input_features"] = [torch.randn(batch, bins, frames), torch.randn(batch, frames, bins), torch.randn(batch, 1, frames, bins)]
        known["hidden_states"] = [patches, torch.randn(batch, length, width)]
        known["grid_thw"] = [grid]
        known["inputs_embeds"] = [torch.randn(batch, length, width)]
    return {name: shapes for name, shapes in known.items() if shapes}


def _first(config: Any, names: tuple[str, ...], default: int) -> Any:
    """A field of a configuration, or of the first part that has it."""
    parts = [config, *(part for part in vars(config).values() if isinstance(part, transformers.PretrainedConfig))]
    return next((getattr(part, name) for part in parts for name in names if getattr(part, name, None)), default)
