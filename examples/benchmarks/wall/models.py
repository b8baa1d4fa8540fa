"""Every architecture of transformers, shrunk, rewritten and trained a step in fp16 and bf16, beside fp32 and torch.autocast.

    python examples/benchmarks/wall/models.py [--dtype bf16,fp16] [--out models.jsonl] [--only bert,llama] [--shard 0/20] [--html FILE]

A configuration of each model type is made small by the names of its fields: widths, depths, heads, vocabularies, image sizes. Nothing is
downloaded, and no model has a rule of its own. What fp32 does not run shrunk, says so and counts for nothing.

A model is right if it is captured, every error is within twice autocast's or the format's floor, the step leaves finite parameters,
eval works after train, and no less of its products runs low than under autocast unless a warning or the plan says so.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from children import Row, chosen, follow, page, parser, run_cases, tally
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import amprewrite
from amprewrite.tables.formats import parse_format

FLOOR = {"bf16": 2e-2, "fp16": 4e-3}
"""Relative L2 errors of outputs, and of all gradients together, that are no more than a few roundings."""
SHARE = 2.0
LEFT_OUT = frozenset({"fp32 fails"})
GOOD = frozenset({"right"}) | LEFT_OUT
SECONDS = 240.0
WIDTH, DEPTH, HEADS, WORDS, IMAGE, PATCH, LENGTH = 32, 2, 2, 96, 32, 8, 12
LARGEST = 3e7
"""Parameters beyond which a model has not been made small."""


# -- shrinking -------------------------------------------------------------------------------
def shrink(config: Any, depth: int = 0) -> Any:
    """Make a configuration small by the names of its fields, parts included."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig) and depth < 4:
            shrink(value, depth + 1)
            continue
        small = _small(name.lower(), value)
        if small is not None and small != value:
            try:
                setattr(config, name, small)
            except Exception:  # a field that refuses to be set keeps its size
                continue
    return config


def _small(name: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str | dict):
        return None
    if isinstance(value, float):
        return 0.0 if "drop" in name else None
    if isinstance(value, list | tuple):
        return _small_list(name, value)
    if not isinstance(value, int):
        return None
    return _small_number(name, value)


def _small_list(name: str, value: Any) -> Any:
    if not value or not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        return None
    kind = type(value)
    if "depth" in name or name.endswith(("layers", "layer_repeats", "num_blocks")):
        return kind([1] * len(value))
    if any(word in name for word in ("hidden_sizes", "embed_dim", "channels", "dims", "widths", "conv_dim")):
        return kind([WIDTH] * len(value)) if len(set(value)) == 1 else kind([WIDTH * 2 ** min(index, 2) for index in range(len(value))])
    if "image_size" in name:
        return kind([IMAGE] * len(value))
    return None


def _small_number(name: str, value: int) -> int | None:
    """The small value of one field; None to leave it."""
    if name.endswith(("token_id", "_id", "_index", "token_index")):
        return min(value, WORDS - 1) if value > 2 else None
    if "vocab" in name:
        return min(value, WORDS)
    for words, small in _RULES:
        if any(word in name for word in words) and "group" not in name:
            return min(value, small)
    return None


_RULES: tuple[tuple[tuple[str, ...], int], ...] = (
    (("image_size", "img_size", "input_size"), IMAGE),
    (("patch_size",), PATCH),
    (("experts_per_tok", "num_experts_per", "top_k", "topk", "moe_k"), 2),
    (("num_experts", "n_routed", "num_local_experts"), 4),
    (("head_dim", "qk_nope", "qk_rope", "v_head", "kv_channels", "d_kv", "head_size"), WIDTH // HEADS),
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
    """What the forward of a model asks for by name."""
    named = inspect.signature(model.forward).parameters
    config: Any = model.config
    size = _first(config, ("image_size", "img_size"), IMAGE)
    size = size if isinstance(size, int) else IMAGE
    channels = _first(config, ("num_channels", "in_channels"), 3)
    found: dict[str, Tensor] = {}
    ids = torch.randint(3, _first(config, ("vocab_size",), WORDS) - 1, (2, LENGTH))
    if "input_ids" in named:
        found["input_ids"] = ids
        if "attention_mask" in named:
            found["attention_mask"] = torch.ones_like(ids)
    if "pixel_values" in named:
        found["pixel_values"] = torch.randn(2, channels if isinstance(channels, int) else 3, size, size)
    if "input_values" in named and "input_ids" not in named:
        found["input_values"] = torch.randn(2, 4000)
    if "input_features" in named and "input_ids" not in named:
        bins = _first(config, ("num_mel_bins", "input_channels", "feature_size"), 80)
        found["input_features"] = torch.randn(2, bins if isinstance(bins, int) else 80, 2 * _first(config, ("max_source_positions",), 32))
    if "decoder_input_ids" in named and found:
        found["decoder_input_ids"] = ids[:, : LENGTH // 2]
    if not found:
        raise ValueError(f"no inputs are known for forward({', '.join(named)})")
    return found


def _first(config: Any, names: tuple[str, ...], default: int) -> Any:
    """A field of a configuration, or of the first part that has it."""
    parts = [config, *(part for part in vars(config).values() if isinstance(part, transformers.PretrainedConfig))]
    return next((getattr(part, name) for part in parts for name in names if getattr(part, name, None)), default)


# -- counting --------------------------------------------------------------------------------
class Counted(TorchDispatchMode):
    """FLOPs of products by dtype, and casts between floats, as they are executed."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[torch.dtype] = Counter()
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        count = flop_registry.get(func.overloadpacket)
        if count is not None and given:
            self.flops[given[-1].dtype] += count(*args, **(kwargs or {}), out_val=out)
        casting = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_) and len(given) > 0
        if casting and isinstance(out, Tensor) and out.is_floating_point():
            self.casts += given[-1].dtype is not out.dtype and given[-1].is_floating_point()
        return out

    def share(self, low: torch.dtype) -> float:
        """Share of FLOPs in the low format; 1 if there are none."""
        total = sum(self.flops.values())
        return self.flops[low] / total if total else 1.0


# -- one model -------------------------------------------------------------------------------
def built(name: str) -> nn.Module:
    config = shrink(transformers.CONFIG_MAPPING[name]())
    seeds(0)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in transformers.AutoModel.from_config(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"it has {size:.2g} parameters when shrunk")
    seeds(0)
    model: nn.Module = transformers.AutoModel.from_config(config)
    return model.float()


def seeds(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def step(model: nn.Module, given: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of one forward and backward in training mode."""
    seeds(1)
    model.zero_grad(set_to_none=True)
    results = floats(model(**given))
    sum((each.float() * _weights(each)).mean() for each in results if each.requires_grad).backward()
    return [each.detach() for each in results], [p.grad for p in model.parameters() if p.grad is not None]


def floats(results: Any) -> list[Tensor]:
    if isinstance(results, transformers.utils.ModelOutput):
        results = dict(results)
    return [each for each in tree_leaves(results) if isinstance(each, Tensor) and each.is_floating_point()]


def _weights(result: Tensor) -> Tensor:
    return torch.linspace(-1, 1, result.numel()).reshape(result.shape)


def error(exact: list[Tensor], got: list[Tensor]) -> float:
    """Relative L2 error of all together; infinite where shapes or finiteness differ."""
    if [each.shape for each in exact] != [each.shape for each in got]:
        return float("inf")
    lost = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(exact, got, strict=True))
    size = sum(float(a.double().square().sum()) for a in exact)
    return (lost / size) ** 0.5 if size else lost**0.5


def judge(name: str, dtypes: tuple[str, ...]) -> Row:
    """One row for a model: what the formats' rows say together, and the worst outcome."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        model = built(name).train()
        seeds(2)
        given = inputs(model)
        exact, gradients = step(model, given)
        again = step(model, given)
    except Exception as problem:  # what fp32 does not run tells nothing
        return {"outcome": "fp32 fails", "why": _line(problem)}
    if not all(bool(each.isfinite().all()) for each in (*exact, *gradients)):
        return {"outcome": "fp32 fails", "why": "its outputs or gradients are not finite"}
    chance = error(exact, again[0]) > 1e-6
    rows = {dtype: _judge_format(copy.deepcopy(model), given, exact, gradients, dtype, chance) for dtype in dtypes}
    bad = next((dtype for dtype in dtypes if rows[dtype]["outcome"] != "right"), "")
    why = {"why": f"{bad}: {rows[bad].get('why', '')}"} if bad else {}
    size = sum(parameter.numel() for parameter in model.parameters())
    return {"outcome": rows[bad]["outcome"] if bad else "right", **why, "parameters": size, **rows}


def _judge_format(
    model: nn.Module, given: dict[str, Tensor], exact: list[Tensor], gradients: list[Tensor], dtype: str, chance: bool
) -> Row:
    low = parse_format(dtype).dtype
    rival, theirs = copy.deepcopy(model), Counted()
    try:
        with torch.autocast("cpu", dtype=low):
            other = step(rival, given)
        with torch.autocast("cpu", dtype=low), theirs:  # a context of its own: casts of weights are kept within one
            rival(**given)
        against = [error(exact, other[0]), error(gradients, other[1])]
    except Exception:  # autocast need not run what we run
        against = [float("inf")] * 2
    row: Row = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            amp = amprewrite.rewrite(model, dtype=dtype)
            got = step(amp, given)
            ours = Counted()
            with ours:
                amp(**given)
            row = {
                "errors": [error(exact, got[0]), error(gradients, got[1])], "autocast": against,
                "share": ours.share(low), "autocast's share": theirs.share(low), "casts": ours.casts, "autocast's casts": theirs.casts,
                "graphs": len(amp.plan.regions),
            }  # fmt: skip
            _train_and_eval(amp, given)
        except Exception as problem:  # the outcome that must not be
            return {**row, "outcome": "raises", "why": f"{type(problem).__name__}: {_line(problem)}"}
    row["warnings"] = sorted({str(each.message)[:160] for each in said if issubclass(each.category, amprewrite.AmpRewriteWarning)})
    limits = [max(FLOOR[dtype], SHARE * each) if each != float("inf") else float("inf") for each in against]
    far = [f"{have:.3g} over {most:.3g}" for have, most in zip(row["errors"], limits, strict=True) if not have <= most]
    if far and not chance:
        return {**row, "outcome": "off", "why": f"errors of outputs, gradients {row['errors']}, autocast's {against}"}
    mine, most = row["share"], row["autocast's share"]
    if mine < most - 0.01:
        row["high"] = sorted({f"{node.op}: {node.why()}"[:200] for node in amp.plan.nodes if node.flops and node.colour.value == "high"})
        return {**row, "outcome": "said fp32" if row["warnings"] else "more fp32", "why": f"{mine:.2f} of FLOPs low, autocast {most:.2f}"}
    return {**row, "outcome": "right"}


def _train_and_eval(amp: nn.Module, given: dict[str, Tensor]) -> None:
    """One step of AdamW, and eval after it; an error if what comes out is not finite."""
    optimizer = torch.optim.AdamW(amp.parameters(), lr=1e-4)
    step(amp, given)
    optimizer.step()
    if not all(bool(parameter.isfinite().all()) for parameter in amp.parameters()):
        raise FloatingPointError("parameters are not finite after a step")
    amp.eval()
    with torch.no_grad():
        if not all(bool(each.isfinite().all()) for each in floats(amp(**given))):
            raise FloatingPointError("outputs are not finite in eval after train")


def _line(problem: BaseException) -> str:
    return " ".join(str(problem).split())[:300]


def names() -> Iterator[str]:
    yield from MODEL_MAPPING_NAMES


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dtype", default="bf16,fp16")
    asked = options.parse_args()
    torch.set_num_threads(1)  # threads of OpenMP do not live on in a forked child
    kept = chosen(names(), asked)
    amprewrite.rewrite(nn.Linear(2, 2), dtype="bf16")(torch.ones(1, 2)).sum().backward()  # imports are made before any child is forked
    dtypes = tuple(asked.dtype.split(","))
    rows = follow(run_cases(kept, functools.partial(judge, dtypes=dtypes), asked.out, SECONDS), len(kept), GOOD)
    counted = [row for row in rows if row["outcome"] not in LEFT_OUT]
    title = f"transformers {transformers.__version__}, shrunk: {len(rows)} tried, {len(counted)} run in fp32"
    table = Table("outcome", "models", title=title)
    for outcome, count in tally(rows).items():
        table.add_row(outcome, str(count))
    Console().print(table)
    if asked.html:
        flat = [{**row, **{f"{d} {key}": row[d].get(key, "") for d in dtypes if d in row for key in ("share", "casts")}} for row in rows]
        columns = ("name", "outcome", *(f"{d} {key}" for d in dtypes for key in ("share", "casts")), "parameters", "seconds", "why")
        asked.html.write_text(page("transformers, shrunk", flat, columns))


if __name__ == "__main__":
    main()
