"""How a wall of models judges one: rewritten, trained a step in each format, beside fp32 and torch.autocast.

A model is right if it is captured, every error is within twice autocast's or the format's floor, the step leaves finite parameters,
eval works after train, and no less of its products runs low than under autocast unless a warning or the plan says so.
"""

from __future__ import annotations

import copy
import random
import warnings
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from children import Row, page, tally
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from weights import of_positions

import amprewrite
from amprewrite.tables.formats import parse_format

FLOOR = {"bf16": 2e-2, "fp16": 4e-3}
"""Relative L2 errors of outputs, and of all gradients together, that are no more than a few roundings."""
SHARE = 2.0
LEAST = 0.05
"""Change of results with positions in reverse, below which a model proves nothing about positions."""
CAPTURED = 1e-3
"""Error of plain torch.compile in fp32 from which on capture, not rounding, makes a model another."""
LEFT_OUT = frozenset({"fp32 fails"})
GOOD = frozenset({"right"}) | LEFT_OUT
SECONDS = 240.0

Given = dict[str, Any]
Build = Callable[[str], tuple[nn.Module, Given]]
"""Makes the model of a name, and what its forward is given by keyword; raises where fp32 does not run it."""


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
def seeds(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def step(model: nn.Module, given: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of one forward and backward in training mode."""
    seeds(1)
    model.zero_grad(set_to_none=True)
    results = floats(model(**given))
    sum((each.float() * _weights(each)).sum() / each.numel() ** 0.5 for each in results if each.requires_grad).backward()
    return [each.detach() for each in results], [p.grad for p in model.parameters() if p.grad is not None]


def floats(results: Any) -> list[Tensor]:
    if isinstance(results, dict):
        results = dict(results)  # a class of its own is a leaf
    return [each for each in tree_leaves(results) if isinstance(each, Tensor) and each.is_floating_point()]


def _weights(result: Tensor) -> Tensor:
    """Weights that vary from element to element: nearly constant ones are what a norm takes out, and leave its backward to rounding."""
    return torch.arange(result.numel(), dtype=torch.float32, device=result.device).mul(1.7).sin().reshape(result.shape)


def error(exact: list[Tensor], got: list[Tensor]) -> float:
    """Relative L2 error of all together; infinite where shapes or finiteness differ."""
    if [each.shape for each in exact] != [each.shape for each in got]:
        return float("inf")
    lost = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(exact, got, strict=True))
    size = sum(float(a.double().square().sum()) for a in exact)
    return (lost / size) ** 0.5 if size else lost**0.5


def judge(build: Build, dtypes: Sequence[str], name: str, device: str = "cpu") -> Row:
    """One row for a model: what the formats' rows say together, and the worst outcome. Without formats: whether fp32 runs it."""
    warnings.simplefilter("ignore")
    torch.backends.cudnn.allow_tf32 = False  # fp32 is the truth
    try:
        model, given = build(name)
        untouched = copy.deepcopy(model)  # some models keep what a call gave, with its history
        exact, gradients = step(model, given)
        again = step(model, given)
    except Exception as problem:  # what fp32 does not run tells nothing
        return {"outcome": "fp32 fails", "why": _line(problem)}
    if not all(bool(each.isfinite().all()) for each in (*exact, *gradients)):
        return {"outcome": "fp32 fails", "why": "its outputs or gradients are not finite"}
    chance = error(exact, again[0]) > 1e-6
    rows = {dtype: _judge_format(copy.deepcopy(untouched), given, exact, gradients, dtype, chance, device) for dtype in dtypes}
    bad = next((dtype for dtype in dtypes if rows[dtype]["outcome"] != "right"), "")
    why = {"why": f"{bad}: {rows[bad].get('why', '')}"} if bad else {}
    size = sum(parameter.numel() for parameter in model.parameters())
    positions = of_positions(untouched, given)
    return {"outcome": rows[bad]["outcome"] if bad else "right", **why, "parameters": size, "positions": positions, **rows}


def _judge_format(
    model: nn.Module, given: dict[str, Tensor], exact: list[Tensor], gradients: list[Tensor], dtype: str, chance: bool, device: str
) -> Row:
    low = parse_format(dtype).dtype
    rival, theirs = copy.deepcopy(model), Counted()
    try:
        with torch.autocast(device, dtype=low):
            other = step(rival, given)
        with torch.autocast(device, dtype=low), theirs:  # a context of its own: casts of weights are kept within one
            rival(**given)
        against = [have if have == have else float("inf") for have in (error(exact, other[0]), error(gradients, other[1]))]
    except Exception:  # autocast need not run what we run
        against = [float("inf")] * 2
    row: Row = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            amp = amprewrite.rewrite(copy.deepcopy(model), dtype=dtype)
            got = step(amp, given)
            ours = Counted()
            with ours:
                amp(**given)
            row = {
                "errors": [error(exact, got[0]), error(gradients, got[1])], "autocast": against,
                "share": ours.share(low), "autocast's share": theirs.share(low), "casts": ours.casts, "autocast's casts": theirs.casts,
                "graphs": len(amp.plan.regions),
            }  # fmt: skip
            kept = copy.deepcopy(amp.state_dict())
            _train_and_eval(amp, given)
            amp.train().load_state_dict(kept)
        except Exception as problem:  # the outcome that must not be
            outcome = "raises" if _compiles(model, given) else "torch.compile raises"
            return {**row, "outcome": outcome, "why": f"{type(problem).__name__}: {_line(problem)}"}
    row["warnings"] = sorted({str(each.message)[:160] for each in said if issubclass(each.category, amprewrite.AmpRewriteWarning)})
    if not chance and _far(row["errors"], against, dtype):
        if (captured := _captured(model, given, exact)) > CAPTURED:
            why = f"in fp32, before any rounding, torch.compile(backend='eager') alone is {captured:.3f} off"
            return {**row, "outcome": "captured otherwise", "why": why}
        row["draws"] = _draws(amp, model, given, low, device)
        if 2 * sum(_far(ours, other, dtype) for ours, other in row["draws"]) >= len(row["draws"]):
            return {**row, "outcome": "off", "why": f"errors of outputs, gradients {row['errors']}, autocast's {against}"}
    mine, most = row["share"], row["autocast's share"]
    if mine < most - 0.01:
        row["high"] = sorted({f"{node.op}: {node.why()}"[:200] for node in amp.plan.nodes if node.flops and node.colour.value == "high"})
        said_so = row["warnings"] or row["high"]
        return {**row, "outcome": "said fp32" if said_so else "silent fp32", "why": f"{mine:.2f} of FLOPs low, autocast {most:.2f}"}
    return {**row, "outcome": "right"}


def _far(have: Sequence[float], against: Sequence[float], dtype: str) -> bool:
    """Whether an error is above twice autocast's and above the floor. What autocast cannot run finitely sets no limit."""
    limits = [max(FLOOR[dtype], SHARE * each) for each in against]
    return any(most != float("inf") and not error <= most for error, most in zip(have, limits, strict=True))


def _compiles(model: nn.Module, given: Given) -> bool:
    """Whether torch.compile alone runs the model in fp32: masks that eager code leaves out where they mask nothing may not fit."""
    torch._dynamo.reset()
    try:
        torch.compile(copy.deepcopy(model), backend="eager")(**given)
    except Exception:
        return False
    return True


def _captured(model: nn.Module, given: Given, exact: list[Tensor]) -> float:
    """Error of the outputs under torch.compile alone, in fp32. NumPy draws for it as for us: Dynamo's own draws are no other model."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(use_numpy_random_stream=True):
        return error(exact, step(torch.compile(copy.deepcopy(model), backend="eager"), given)[0])


def _draws(
    amp: nn.Module, exact: nn.Module, given: Given, low: torch.dtype, device: str, count: int = 4
) -> list[tuple[list[float], list[float]]]:
    """Errors, ours and autocast's, on other inputs. A choice such as top-k flips by chance where two values differ by a rounding."""
    rows = []
    for shift in range(1, count + 1):
        moved = {
            name: each.roll(shift, -1) if isinstance(each, Tensor) and (each.is_floating_point() or name == "input_ids") else each
            for name, each in given.items()
        }
        right = step(exact, moved)
        with torch.autocast(device, dtype=low):
            other = step(exact, moved)
        got = step(amp, moved)
        ours, theirs = ([error(a, b) for a, b in zip(right, each, strict=True)] for each in (got, other))
        rows.append((ours, theirs))
    return rows


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




# -- the table -------------------------------------------------------------------------------
def asks_formats(options: ArgumentParser) -> None:
    options.add_argument("--dtype", default="bf16,fp16", help="formats, with a comma between; an empty word asks only what fp32 runs")


def formats(asked: Namespace) -> tuple[str, ...]:
    return tuple(word for word in asked.dtype.split(",") if word)


def warm_up() -> None:
    """Make imports before a child is forked, and start no thread: OpenMP's do not live on in a child, nor do those of backward."""
    torch.set_num_threads(1)
    amprewrite.rewrite(nn.Linear(2, 2), dtype="bf16")(torch.ones(1, 2))


def show(source: str, rows: Iterable[Row], asked: Namespace) -> None:
    """Print how many models have each outcome, and of how many positions change nothing; write the page if it was asked for."""
    rows = list(rows)
    counted = [row for row in rows if row["outcome"] not in LEFT_OUT]
    table = Table("outcome", "models", title=f"{source}: {len(rows)} tried, {len(counted)} run in fp32")
    for outcome, count in tally(rows).items():
        table.add_row(outcome, str(count))
    Console().print(table)
    flat_in_positions = [row["name"] for row in counted if row.get("positions") is not None and row["positions"] < LEAST]
    if flat_in_positions:
        print(f"{len(flat_in_positions)} prove nothing about positions, which change no result: {', '.join(flat_in_positions)}")
    if asked.html:
        dtypes = formats(asked)
        flat = [{**row, **{f"{d} {key}": row[d].get(key, "") for d in dtypes if d in row for key in ("share", "casts")}} for row in rows]
        columns = ("name", "outcome", *(f"{d} {key}" for d in dtypes for key in ("share", "casts")), "parameters", "seconds", "why")
        asked.html.write_text(page(source, flat, columns))
