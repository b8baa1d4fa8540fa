"""PyTorch's own op and module databases, forward and backward, rewritten to fp16 or bf16 beside fp32 and torch.autocast.

    python examples/benchmarks/wall/torch_ops.py [--dtype bf16] [--samples 3] [--out ops.jsonl] [--only conv] [--shard 0/4] [--html FILE]

Every op with fp32 samples is called in two ways: `plain`, alone; and `fed`, on what a product in low precision gives, so that ops which
follow their neighbours run low, too. Every module is called in training and in eval mode. A case is right if nothing is raised that
fp32 does not raise, results and gradients have fp32's dtypes, shapes and structure, and each error is within twice autocast's, twice what
rounding the fed input and its gradient costs, or the format's floor. Of what autocast does not run, the same wholly in the format stands
for it. The error is the largest difference relative to the largest number.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from children import Row, chosen, follow, page, parser, run_cases, tally
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

import amprewrite
from amprewrite.tables.formats import parse_format

FLOOR = {"bf16": 1e-2, "fp16": 2e-3}
"""Errors that are no more than rounding a result and its operands once."""
SHARE = 2.0
"""How many times autocast's error may be reached beyond the floor."""
DROWNED = 16
"""How many times larger the largest gradient of a call is than one whose rounding counts for less: it says where others cancel."""
MANY = 24
"""Samples of an op that are looked at, to choose from."""
UNSET = ("empty", "new_empty", "resize", "empty_like", "empty_strided", "empty_permuted")
"""Parts of names of ops whose results hold what memory held."""
LEFT_OUT = frozenset({"no sample", "fp32 fails"})
GOOD = frozenset({"right"}) | LEFT_OUT
SECONDS = 300.0


@dataclass
class Call:
    """A module and what it is called with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: str


@dataclass
class Outcome:
    """What a call gave: results, gradients of inputs and parameters, or what it raised."""

    results: Any = None
    gradients: list[Tensor | None] = field(default_factory=list)
    raised: str = ""


class Plain(nn.Module):
    """A module that does one op."""

    def __init__(self, op: Callable[..., Any]) -> None:
        super().__init__()
        self.op = op

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


class Fed(Plain):
    """The op on the result of a product by one, which any policy computes low."""

    def __init__(self, op: Callable[..., Any]) -> None:
        super().__init__(op)
        self.one: Tensor
        self.register_buffer("one", torch.ones(1, 1))

    def forward(self, first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.op(torch.matmul(first.unsqueeze(-1), self.one).squeeze(-1), *args, **kwargs)


# -- cases -----------------------------------------------------------------------------------
@functools.cache
def cases() -> dict[str, Any]:
    """Every op that knows fp32, and every module, by name."""
    ops = [info for info in op_db if torch.float32 in info.supported_dtypes("cpu")]
    found = {f"op/{info.full_name if hasattr(info, 'full_name') else info.name}": info for info in ops}
    return found | {f"module/{info.name}": info for info in module_db}


def calls(name: str, count: int) -> Iterator[Call]:
    info = cases()[name]
    yield from (_op_calls if name.startswith("op/") else _module_calls)(info, count)


def _op_calls(info: Any, count: int) -> Iterator[Call]:
    samples = list(itertools.islice(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd), MANY))
    for index in sorted({round(part * (len(samples) - 1) / max(count - 1, 1)) for part in range(count)}) if samples else ():
        sample = samples[index]
        args = (sample.input, *sample.args)
        yield Call(Plain(info.op), args, sample.kwargs, f"plain {index}")
        first = sample.input
        if isinstance(first, Tensor) and first.dtype is torch.float32 and first.layout is torch.strided and first.numel():
            yield Call(Fed(info.op), args, sample.kwargs, f"fed {index}")


def _module_calls(info: Any, count: int) -> Iterator[Call]:
    for training in (True, False):
        given = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
        for index, each in enumerate(itertools.islice(given, count)):
            if each.forward_input is None:
                continue
            module = info.module_cls(*each.constructor_input.args, **each.constructor_input.kwargs).train(training)
            if "Lazy" in info.name:  # its first call gives it its parameters
                module(*each.forward_input.args, **each.forward_input.kwargs)
            yield Call(module, each.forward_input.args, each.forward_input.kwargs, f"{'train' if training else 'eval'} {index}")


# -- one case --------------------------------------------------------------------------------
def compare(name: str, dtype: str, count: int) -> Row:
    """The worst of a case's calls."""
    warnings.simplefilter("ignore")
    seeds(0)
    worst: Row = {"outcome": "no sample"}
    tried = low = 0
    for call in calls(name, count):
        seeds(1)
        row = compare_call(call, dtype, unset=any(word in name for word in UNSET))
        tried += row["outcome"] not in LEFT_OUT
        low += row.pop("low", 0)
        if RANK.index(row["outcome"]) > RANK.index(worst["outcome"]) or (
            row["outcome"] == worst["outcome"] and row.get("error", 0) > worst.get("error", 0)
        ):
            worst = {**row, "call": call.label}
    return {**worst, "calls": tried, "low": low}


RANK = ("no sample", "fp32 fails", "right", "off", "differs", "raises")
"""Outcomes, the worst last."""


def compare_call(call: Call, dtype: str, unset: bool) -> Row:
    exact = run(call, copy.deepcopy(call.module))
    if exact.raised:
        return {"outcome": "fp32 fails", "why": exact.raised}
    with torch.random.fork_rng():
        chance = unset or distance(exact, run(call, copy.deepcopy(call.module), seed=3)) > 0
    amp = amprewrite.rewrite(copy.deepcopy(call.module), dtype=dtype)
    ours = run(call, amp)
    low = sum(node.colour.value == "low" and node.role == "op" for node in amp.plan.nodes) if not ours.raised else 0
    if ours.raised:
        return {"outcome": "raises", "why": ours.raised, "low": low}
    other = unlike(exact, ours)
    if other:
        return {"outcome": "differs", "why": other, "low": low}
    if chance:
        return {"outcome": "right", "low": low}
    error, theirs = distance(exact, ours), autocast_error(call, exact, parse_format(dtype).dtype)
    given = rounding_error(call, exact, dtype) if isinstance(call.module, Fed) else 0.0
    good = error <= max(FLOOR[dtype], SHARE * max(given, theirs or 0.0))
    why = {} if good else {"why": f"off by {error:.3g}, autocast {'raises' if theirs is None else f'by {theirs:.3g}'}"}
    return {"outcome": "right" if good else "off", "error": error, "autocast": theirs, "low": low, **why}


def autocast_error(call: Call, exact: Outcome, low: torch.dtype) -> float | None:
    """torch.autocast's error; of what it does not run, that of module and inputs wholly in the format; None if neither runs."""
    rival = run(call, copy.deepcopy(call.module), autocast=low)
    if rival.raised:
        args, kwargs = tree_map(functools.partial(_lowered, low=low), (call.args, call.kwargs))
        rival = run(Call(call.module, args, kwargs, call.label), copy.deepcopy(call.module).to(low))
    return None if rival.raised else distance(exact, rival)


def _lowered(value: Any, low: torch.dtype) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().to(low).requires_grad_(value.requires_grad) if floating else value


def rounding_error(call: Call, exact: Outcome, dtype: str) -> float:
    """The error of rounding the first input and its gradient: what no policy that runs the product before it low can do without."""
    low, first = parse_format(dtype).dtype, call.args[0].detach()
    start = first.to(low).to(first.dtype).requires_grad_(call.args[0].requires_grad)
    found = run(Call(call.module, (start, *call.args[1:]), call.kwargs, call.label), copy.deepcopy(call.module))
    if found.gradients and found.gradients[0] is not None and not found.raised:
        found.gradients[0] = found.gradients[0].to(low).to(first.dtype)
    return distance(exact, found)


def seeds(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def run(call: Call, module: nn.Module, autocast: torch.dtype | None = None, seed: int = 2) -> Outcome:
    """Forward, and backward where a gradient is wanted; on copies of the inputs."""
    args, kwargs = tree_map(_fresh, (call.args, call.kwargs))
    seeds(seed)
    try:
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            results = module(*args, **kwargs)
        leaves = [each for each in tree_leaves(results) if isinstance(each, Tensor) and each.requires_grad]
        wanted = [each for each in (*tree_leaves((args, kwargs)), *module.parameters()) if isinstance(each, Tensor) and each.requires_grad]
        gradients: list[Tensor | None] = []
        if leaves and wanted:
            for each in wanted:
                each.grad = None
            torch.autograd.backward(leaves, [_cotangent(each) for each in leaves])
            gradients = [each.grad for each in wanted]
    except Exception as error:
        return Outcome(raised=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Outcome(results, gradients)


def _fresh(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else copy.copy(value)


def _cotangent(result: Tensor) -> Tensor:
    """Fixed numbers around one, of the result's own dtype."""
    plain = result.to_dense() if result.layout is not torch.strided else result
    parts = torch.linspace(0.5, 1.5, plain.numel(), dtype=torch.float64).reshape(plain.shape).to(result.dtype)
    return parts.to_sparse().to(result.device) if result.layout is torch.sparse_coo else parts


def unlike(exact: Outcome, ours: Outcome) -> str:
    """How results or gradients differ in structure, dtype, layout or shape; "" if they do not."""
    wants, want = tree_flatten(exact.results)
    haves, have = tree_flatten(ours.results)
    if want != have:
        return f"structure {have} for {want}"
    if len(exact.gradients) != len(ours.gradients):
        return f"{len(ours.gradients)} gradients for {len(exact.gradients)}"
    pairs = [*zip(wants, haves, strict=True), *zip(exact.gradients, ours.gradients, strict=True)]
    for index, (left, right) in enumerate(pairs):
        which = f"result {index}" if index < len(wants) else f"gradient {index - len(wants)}"
        if type(left) is not type(right):
            return f"{which} is a {type(right).__name__} for a {type(left).__name__}"
        if not isinstance(left, Tensor):
            continue
        for what in ("dtype", "layout", "requires_grad", "shape"):
            if getattr(left, what) != getattr(right, what):
                return f"{which} has {what} {getattr(right, what)} for {getattr(left, what)}"
    return ""


def distance(exact: Outcome, other: Outcome) -> float:
    """The largest error of any result or gradient; infinite where something else differs."""
    if other.raised:
        return float("inf")
    lefts, rights = (tree_leaves(each.results) for each in (exact, other))
    if len(lefts) != len(rights) or len(exact.gradients) != len(other.gradients):
        return float("inf")
    results = [_apart(left, right) for left, right in zip(lefts, rights, strict=True)]
    least = max((_size(each) for each in exact.gradients if each is not None), default=0.0) / DROWNED
    gradients = [_apart(left, right, least) for left, right in zip(exact.gradients, other.gradients, strict=True)]
    return max([*results, *gradients], default=0.0)


def _size(tensor: Tensor) -> float:
    """The largest finite magnitude in it."""
    plain = tensor.detach().to_dense().abs()
    return float(plain[plain.isfinite()].max()) if plain.isfinite().any() else 0.0


def _apart(left: Any, right: Any, least: float = 0.0) -> float:
    """The largest error relative to the largest number, or to `least` if that is larger."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return 0.0 if type(left) is type(right) and (left == right or left != left) else float("inf")
    want, have = (each.detach().to_dense() if each.layout is not torch.strided else each.detach() for each in (left, right))
    if want.shape != have.shape:
        return float("inf")
    if not (want.is_floating_point() or want.is_complex()):
        return 0.0 if torch.equal(want, have) else float("inf")
    want, have = (each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (want, have))
    plain = want.isfinite()
    if not plain.equal(have.isfinite()) or not torch.equal(want[~plain].isnan(), have[~plain].isnan()):
        return float("inf")
    if not want[plain].numel():
        return 0.0
    return float((want - have)[plain].abs().max()) / (max(float(want[plain].abs().max()), least) or 1.0)


def main() -> None:
    options = parser(__doc__, SECONDS)
    options.add_argument("--dtype", default="bf16")
    options.add_argument("--samples", type=int, default=3, help="samples of each op, and of each module in either mode")
    asked = options.parse_args()
    torch.set_num_threads(1)  # threads of OpenMP do not live on in a forked child
    names = chosen(cases(), asked)
    amprewrite.rewrite(nn.Linear(2, 2), dtype=asked.dtype)(torch.ones(1, 2)).sum().backward()  # imports are made before any child is forked
    work = functools.partial(compare, dtype=asked.dtype, count=asked.samples)
    rows = follow(run_cases(names, work, asked.out, asked.seconds), len(names), GOOD)
    counted = [row for row in rows if row["outcome"] not in LEFT_OUT]
    table = Table("database", "cases", "calls", "ops low", *tally(counted), title=f"torch {torch.__version__}'s databases in {asked.dtype}")
    for kind in ("op", "module"):
        mine = [row for row in counted if row["name"].startswith(f"{kind}/")]
        sums = [str(sum(row.get(what, 0) for row in mine)) for what in ("calls", "low")]
        table.add_row(kind, str(len(mine)), *sums, *(str(tally(mine).get(outcome, 0)) for outcome in tally(counted)))
    Console().print(table)
    if asked.html:
        columns = ("name", "outcome", "call", "error", "autocast", "calls", "low", "why")
        asked.html.write_text(page(f"PyTorch's databases, {asked.dtype}", counted, columns))


if __name__ == "__main__":
    main()
