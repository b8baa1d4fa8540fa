"""Random sets of options of `rewrite`, valid and not.

A valid set gives a model that runs and agrees with fp32. An invalid one raises an AmpRewriteError of at most 600 characters, before
anything was done to the model or to an optimizer.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

import amprewrite
from tests.fuzz.oracle import Problem, failure, start_clean

LONGEST = 600


class Net(nn.Module):
    """What the options are tried on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


def _inputs() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


VALUES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "dtype": (
        ("'bf16'", "'fp16'", "'half'", "torch.bfloat16", "torch.float16", "'fp32'", "None"),
        ("'fp8'", "'int8'", "torch.int32", "16", "''", "b'bf16'", "['bf16']", "object()", "'x' * 5000", "torch.float64"),
    ),
    "lists": (("'default'", "'tf'", "'autocast'", "'o2'", "'o3'"), ("'tensorflow'", "3", "None", "['a']", "{}", "'y' * 5000")),
    "overrides": (
        ("{}", "None", "{'linear': 'deny'}", "{'module:first': 'fp32'}", "{'tanh': 'deny', 'module:n*': 'fp32'}"),
        ("{'module:nothing': 'fp32'}", "{'linear': 'maybe'}", "{'nosuchop': 'deny'}", "['linear']", "(i for i in ())", "5", "{3: 'deny'}",
         "{'linear': 5}", "{'linear': None}", "{'z' * 5000: 'deny'}", "{'linear': 'q' * 5000}", "{('module', 'first'): 'fp32'}"),
    ),
    "example_inputs": (("None", "(x,)", "[x]"), ("'x'", "5", "{'x': x}", "iter([x])", "set()")),
    "example_kwargs": (("None", "{'x': x}"), ("[x]", "'x'", "5", "{1: x}", "(x,)", "x")),
    "optimizer": (
        ("None", "torch.optim.SGD(model.parameters(), 0.1)", "[torch.optim.Adam(model.parameters())]", "()"),
        ("'adam'", "5", "[5]", "torch.optim.Adam", "torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)", "{'a': 1}"),
    ),
    "plan": (("None", "given"), ("'plan'", "{}", "5", "given.to_json()", "[given]")),
    "calibration": (("None", "[x]", "[(x,)]", "measured"), ("5", "'ranges.json'", "[]", "[object()]", "[torch.randn(3)]", "True")),
    "tolerance": (("None", "0.5"), ("-1", "'small'", "math.nan", "True", "[]", "math.inf", "-math.inf")),
    "accuracy": (("None", "'autocast'"), ("'best'", "5", "True", "'b' * 5000", "['autocast']")),
    "device": (("None", "'a100'", "'h100'", "'cpu'"), ("'gpu9000'", "5", "torch.device('cpu')", "'d' * 5000", "['a100']", "b'cpu'")),
    "measure": (("False",), ("'yes'", "2", "None", "[]")),
    "memory": (("0", "0.01", "0.0"), ("-1", "math.nan", "'a'", "True", "math.inf", "None", "[]")),
    "metric": (
        ("None", "'l2'", "'logprob'", "lambda exact, got: 0.1"),
        ("'kl'", "5", "['logprob']", "dict", "True", "'m' * 5000"),
    ),
    "parity": (("'train'", "'eval'", "0.25", "1", "False", "True"), ("'both'", "-1", "2", "math.nan", "None", "[]", "'p' * 5000")),
    "high": (("'fp32'",), ("'tf32'", "'fp64'", "None", "5", "['fp32']")),
    "loss_scale": (
        ("'auto'", "'dynamic'", "None", "8", "1024.0", "'torch'", "'tf'", "'none'"),
        ("'huge'", "-1", "0", "math.nan", "math.inf", "[]", "True", "'s' * 5000", "{}", "torch.optim"),
    ),
    "pad": (
        ("'auto'", "'always'", "'never'", "16", "{'module:first': 'always'}"),
        ("'sometimes'", "-8", "3.5", "{'module:zz': 'always'}", "[]", "True", "{'module:first': 'p' * 5000}", "{3: 8}"),
    ),
    "granularity": (("'model'", "['first', 'last']", "('fir*',)"), ("['nothing']", "5", "'layers'", "[3]", "None", "['g' * 5000]", "True")),
    "backend": (("'eager'", "lambda graph, inputs: graph"), ("'nonsense'", "5", "None", "['eager']", "'e' * 5000", "True")),
    "cache_weights": (("True", "False", "'step'"), ("'always'", "2", "None", "[]", "'c' * 5000")),
    "strict": (("False", "True"), ("np.int64(8)", "'yes'", "None", "[]", "2")),
}  # fmt: skip
MODELS = (("model",), ("Net", "'model'", "None", "lambda x: x", "[model]", "model.state_dict()"))


@dataclass(frozen=True)
class OptionSet:
    """Options as source text, so that a finding is a script; `wrong` names those that make no sense."""

    seed: int
    model: str
    values: tuple[tuple[str, str], ...]

    @property
    def wrong(self) -> tuple[str, ...]:
        found = [name for name, text in self.values if text in VALUES[name][1]]
        return tuple(found + ["model"] * (self.model not in MODELS[0]))

    def tags(self) -> tuple[str, ...]:
        return tuple(f"{name}={text}" for name, text in self.values if not self.wrong or name in self.wrong)

    @property
    def may_conflict(self) -> bool:
        """Whether valid options may rule each other out, or ask for data that is not given."""
        chosen = {name for name, text in self.values if text not in ("None", "False", "{}", "()", "'auto'", "'never'")}
        data = chosen - {name for name, text in self.values if text == "measured"}  # ranges that were measured hold no batches
        needs_data = chosen & {"tolerance", "accuracy"} and not data & {"calibration", "example_inputs"}
        both = chosen >= {"tolerance", "accuracy"} or chosen >= {"example_inputs", "example_kwargs"}
        given = "plan" in chosen and bool(chosen - {"plan", "example_inputs", "optimizer", "cache_weights", "memory", "high", "measure"})
        unused = "metric" in chosen and "accuracy" not in chosen
        return bool(needs_data or both or given or unused or "tolerance" in chosen)


def generate(seed: int) -> OptionSet:
    choose = random.Random(seed)
    names = choose.sample(list(VALUES), choose.randint(1, 6))
    wrong = set(choose.sample(names, 1)) if choose.random() < 0.6 else set()
    values = {name: choose.choice(VALUES[name][name in wrong]) for name in names}
    values.setdefault("dtype", choose.choice(("'bf16'", "'fp16'")))
    if "example_inputs" not in wrong and "example_inputs" in values and "example_kwargs" in values:
        del values["example_inputs" if "example_kwargs" in wrong else "example_kwargs"]
    model = choose.choice(MODELS[1]) if choose.random() < 0.04 else "model"
    return OptionSet(seed, model, tuple(values.items()))


def check(case: OptionSet) -> Problem | None:
    start_clean()
    torch.manual_seed(0)
    model, x = Net(), _inputs()
    space: dict[str, Any] = {"torch": torch, "nn": nn, "np": np, "math": math, "model": model, "Net": Net, "x": x}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        texts = [text for _, text in case.values]
        if any("given" in text for text in texts):
            space["given"] = amprewrite.plan(model, (x,), dtype="bf16")
        if "measured" in texts:
            space["measured"] = amprewrite.calibrate(model, [x], progress=False)
        options = {name: eval(text, space) for name, text in case.values}
        before = _state(model)
        try:
            amp = amprewrite.rewrite(eval(case.model, space), **options)
        except amprewrite.AmpRewriteError as error:
            return _refused(case, model, before, options, error)
        except Exception as error:
            found = failure(error)
            return replace(found, where=f"{found.where}: {', '.join(case.wrong)}")
        if case.wrong:
            return Problem("accepted", ", ".join(f"{name}" for name in case.wrong), f"{case.tags()} was accepted")
        return _runs(case, model, amp, x)


def _refused(case: OptionSet, model: nn.Module, before: Any, options: dict[str, Any], error: Exception) -> Problem | None:
    """An error is right where something was wrong, short enough, and left no traces."""
    names = ", ".join(case.wrong)
    if not case.wrong and not case.may_conflict:
        return Problem("refused", f"{type(error).__name__} for valid options", f"{case.tags()}: {error}")
    if len(str(error)) > LONGEST:
        return Problem("long", names, f"the message has {len(str(error))} characters: {str(error)[:200]}")
    if _state(model) != before:
        return Problem("half done", names, f"the model is not as it was: {error}")
    optimizers = options.get("optimizer")
    for each in optimizers if isinstance(optimizers, list) else [optimizers]:
        if isinstance(each, torch.optim.Optimizer) and (each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks):
            return Problem("half done", f"{names}: optimizer hooks", f"the optimizer has hooks after the error: {error}")
    return None


def _runs(case: OptionSet, model: nn.Module, amp: Any, x: torch.Tensor) -> Problem | None:
    try:
        amp(x).sum().backward()
        with torch.no_grad():
            got, want = amp(x), model(x)
        text = str(amp.plan)
    except Exception as error:
        if case.may_conflict and isinstance(error, amprewrite.AmpRewriteError):
            return None
        return replace(failure(error), kind="raises when called")
    error = float((got - want).norm() / want.norm())
    if error > 0.02 or got.dtype != want.dtype or not text:
        return Problem("wrong", "result", f"{error:.3g} off with {case.tags()}")
    return None


def _state(model: nn.Module) -> Any:
    """What must not change when options are refused."""
    return (
        type(model), sorted(model.__dict__), [id(p) for p in model.parameters()], [float(p.detach().sum()) for p in model.parameters()],
        [p.grad is None for p in model.parameters()], [sorted(module.__dict__) for module in model.modules()],
    )  # fmt: skip


def smaller(case: OptionSet) -> Iterator[OptionSet]:
    for index in range(len(case.values)):
        yield replace(case, values=case.values[:index] + case.values[index + 1 :])


def shown(case: OptionSet) -> str:
    options = ", ".join(f"{name}={text}" for name, text in case.values)
    return f"""import math

import numpy as np
import torch
from torch import nn

import amprewrite
from tests.fuzz.option_sets import Net

model, x = Net(), torch.randn(4, 8)
given, measured = amprewrite.plan(model, (x,), dtype="bf16"), amprewrite.calibrate(model, [x], progress=False)
amp = amprewrite.rewrite({case.model}, {options})
amp(x).sum().backward()
"""
