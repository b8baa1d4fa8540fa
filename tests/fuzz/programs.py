"""Random programs: modules as source text, built one statement at a time by trying each on real tensors.

1. Choose inputs, whether the program is exact (small integers that both low formats hold), and the kinds of statements it leans to.
2. Fill a template with names of values; run it; keep it if it ran and its results are small, finite and, in exact programs, integers.
3. Choose what is returned, in which structure, which loss is taken, and how the model is called.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import random
import re
import sys
import warnings
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.fuzz.helpers import HELPERS, Held
from tests.fuzz.vocabulary import COUNTED, MODULES, PAIRED_MODULES, THEMES, Template

MOST_ENTRIES = 400
LONG_ENTRIES = 70_000
"""The most in a value of a program whose inputs are long or wide."""
WIDEST = 5_000
"""Width of the widest linear layer: that of a flattened long input would take gigabytes, and minutes."""
LONG = (255, 257, 1024, 2047, 2049, 4097, 4097, 4097)
"""Sizes on both sides of the largest whole numbers that bf16 and fp16 hold, 256 and 2048; of the positions below 2049 fp16 holds all."""
LARGEST = 256
"""The largest integer below which bf16 holds all."""
HEADER = """\
import collections
import contextlib
import dataclasses
import functools
import types

import numpy as np
import torch
import torch.nn.functional as F
from torch import cond, nn
from torch._higher_order_ops import map as hop_map, scan, while_loop
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
"""
SHAPES = ((2, 4), (2, 4), (3, 4), (2, 3, 4), (2, 4, 4), (4, 4), (1, 4), (2, 4, 4, 4))
STRUCTURES = ("bare", "bare", "tuple", "tuple", "list", "dict", "nested", "dataclass", "named", "userdict", "namespace")
LOSSES = ("sum", "sum", "square", "mean", "first", "each", "each_reversed", "outputs", "inner", "unread")
CALLS = (("grad",),) * 8 + (("no_grad",), ("grad", "grad"), ("no_grad", "grad"), ("eval", "grad"), ("grad", "inference"), ("grad", "wide"))
CALLS_OF_RANGE = (
    ("grad", "grad"), ("grad", "grad", "grad"), ("no_grad", "grad"), ("grad", "wide"), ("grad",), ("grad", "load", "grad"), ("load",),
    ("eval", "load"),
)  # fmt: skip
"""How a program with values beyond fp16's range is called: what was seen in one call holds for the next ones."""
VIEWS = (
    "{}.view(-1)", "{}.mT", "{}[..., :1]", "{}.detach()", "{}.view_as({})", "{}[-1]", "{}[:-1]", "{}[:, 0]", "{}.half()", "{}.bfloat16()",
)  # fmt: skip
"""What is returned beside a value: parts of its memory, and low copies."""
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
HOLDERS: dict[str, type] = {each.__name__: each for each in (UserDict, OrderedDict, SimpleNamespace, Held)}
"""Objects in which a caller passes half tensors."""
OPS_WITH_BODIES = re.compile(r"\b(?:cond|while_loop|scan|hop_map|func)\b")
NUMBER = itertools.count()
SPACE = compile(HEADER + "".join(code for code in HELPERS.values() if "register_dataclass" not in code), "<names>", "exec")


@dataclass(frozen=True)
class Statement:
    """A few lines of the forward; `module` is the layer it brings, as attribute and source."""

    tag: str
    text: str
    defines: tuple[str, ...]
    reads: tuple[str, ...]
    modules: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Input:
    name: str
    shape: tuple[int, ...]
    grad: bool = False


@dataclass(frozen=True)
class Program:
    """Everything one case runs: the module's parts, its inputs, the options of rewrite, and how it is called."""

    seed: int
    exact: bool
    inputs: tuple[Input, ...]
    body: tuple[Statement, ...]
    results: tuple[str, ...]
    structure: str
    loss: str
    calls: tuple[str, ...]
    """Modes; before "load" a state dict is loaded whose first matrix fp16 does not hold."""
    options: tuple[tuple[str, Any], ...]
    checks: tuple[str, ...] = ()
    """What else is looked at: "heavy" ops that run, "export", "verify"."""
    huge: bool = False
    """Whether one weight lies beyond what fp16 holds."""
    trained: bool = False
    """Whether weights are of the size that training reaches, so that attention tells places apart."""
    traced: bool = False
    """Whether Dynamo takes torch.autograd.grad into its graphs, as it does if asked; else it breaks them there."""
    device: str = "cpu"
    """Where layers and inputs are."""
    everything_there: bool = True
    """Whether tensors that the program makes are there, too, as torch.set_default_device has it; otherwise they are on the CPU."""

    holder: str = ""
    """The object in which all inputs but the first are passed, in half precision; the reference gets their numbers in fp32."""

    @property
    def dtype(self) -> str:
        return str(dict(self.options)["dtype"])

    @property
    def factor(self) -> float:
        """What the loss is multiplied by: its scale takes a tiny one back to where fp16 holds gradients."""
        return 1 / LARGE_SCALE if dict(self.options).get("loss_scale") == LARGE_SCALE else 1.0

    def source(self) -> str:
        """The module as Python source, whole."""
        modules = dict(pair for each in self.body for pair in each.modules)
        lines = [f"        self.{name} = {made}" for name, made in modules.items()]
        body = [line for each in self.body for line in each.text.splitlines()]
        ending = structured(self.structure, self.results)
        names = ", ".join(each.name for each in self.inputs)
        if self.holder:
            names = f"{self.inputs[0].name}, given"
            lines.append("        self.wide = nn.Parameter(torch.ones(1))")
            mixed = [f"torch.dot(self.wide, {name}.flatten()[:1])" for name in self.held]
            body = [*mixed, *body]  # products with an fp32 weight: without one PyTorch runs on half inputs, and so does the library
            body = [f"{name} = given{f'[{name!r}]' if 'Dict' in self.holder else f'.{name}'}" for name in self.held] + body
        text = "\n".join([*lines, *body, ending])
        helpers = "".join(f"\n{code}" for name, code in HELPERS.items() if re.search(rf"\b{name}\b", text))
        forward = "\n".join(f"        {line}" for line in [*body, f"return {ending}"])
        made = "\n".join(["        super().__init__()", "        self.count = 0", "        self.array = np.ones(1, np.float32)", *lines])
        return f"{HEADER}{helpers}\n\nclass M(nn.Module):\n    def __init__(self):\n{made}\n\n    def forward(self, {names}):\n{forward}\n"

    @property
    def held(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.inputs[1:]) if self.holder else ()

    def tags(self) -> tuple[str, ...]:
        return tuple(sorted({each.tag for each in self.body}))


def structured(structure: str, results: tuple[str, ...]) -> str:
    """The expression that is returned."""
    first, *rest = results
    others = ", ".join(rest) or "None"
    return {
        "bare": first if not rest else f"{first}, {others}",
        "tuple": f"({', '.join(results)},)",
        "list": f"[{', '.join(results)}, None]",
        "dict": "{" + ", ".join(f"'r{i}': {name}" for i, name in enumerate(results)) + "}",
        "nested": f"{{'a': [{first}, ({others}, 3)], 'b': None}}",
        "dataclass": f"Out({first}, ({others},))",
        "named": f"Named({first}, [{others}])",
        "userdict": f"collections.UserDict(first={first}, rest=[{others}])",
        "namespace": f"types.SimpleNamespace(first={first}, rest=({others},))",
    }[structure]


def _cond(predicate: torch.Tensor, yes: Callable[..., Any], no: Callable[..., Any], operands: tuple[Any, ...] = ()) -> Any:
    return (yes if predicate else no)(*operands)


def _while_loop(test: Callable[..., Any], body: Callable[..., Any], carried: tuple[Any, ...]) -> Any:
    while test(*carried):
        carried = body(*carried)
    return carried


def _scan(step: Callable[..., Any], carried: torch.Tensor, rows: torch.Tensor) -> Any:
    found = []
    for row in rows:
        carried, out = step(carried, row)
        found.append(out)
    return carried, torch.stack(found)


def _map(step: Callable[..., Any], rows: torch.Tensor) -> torch.Tensor:
    return torch.stack([step(row) for row in rows])


PLAIN_CONTROL = {"cond": _cond, "while_loop": _while_loop, "scan": _scan, "hop_map": _map}
"""What control flow means, in Python: the reference runs these, as PyTorch's own compile even in eager mode."""


def load(source: str, plain: bool = False) -> type[nn.Module]:
    """The class M of a program's source; its lines are known to inspect and to tracebacks."""
    name = f"<program {next(NUMBER)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    sys.modules["fuzzed"] = home = ModuleType("fuzzed")  # Dynamo imports the module that a function says it is of
    namespace = vars(home)
    exec(compile(source, name, "exec"), namespace)
    if plain:
        namespace.update(PLAIN_CONTROL)
    found: type[nn.Module] = namespace["M"]
    return found


def initialised(program: Program, plain: bool = False) -> nn.Module:
    """The program's model; two calls give equal ones. A `plain` one runs control flow in Python."""
    torch.manual_seed(program.seed)
    model = load(program.source(), plain)().to(program.device)
    if program.exact:
        integers(model, program.seed)
    if program.trained:
        as_trained(model)
    if program.huge:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.flatten()[0] = 7e4  # beyond fp16, and what it gives with an input below 0.9 is not
                    break
    return model


def as_trained(model: nn.Module) -> None:
    """Matrices two and a half times as large as new ones; gains and biases that vary."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draws, device="cpu").to(parameter)
            parameter.mul_(2.5) if parameter.dim() > 1 else parameter.mul_(1 + 0.2 * noise).add_(0.1 * noise)


def load_unfit(model: nn.Module, large: bool) -> None:
    """Load a state dict like the model's own, but that fp16 does not hold its first matrix: an entry is too large, or all are too small."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for value in state.values():
        if value.dim() == 2 and value.is_floating_point():
            value.mul_(1.0 if large else 2.0**-30)
            if large:
                value[0, 0] = 2.0**17
            break
    model.load_state_dict(state)


def integers(model: nn.Module, seed: int) -> None:
    """Give every parameter entries -1, 0 and 1."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=draws, device="cpu"))


def batch(program: Program, wide: bool = False) -> list[torch.Tensor]:
    """The program's inputs; two calls give equal ones. A `wide` batch is twice as large, where every input has a batch."""
    draws = torch.Generator().manual_seed(program.seed + 1)
    found = []
    for each in program.inputs:
        shape = (2 * each.shape[0], *each.shape[1:]) if wide else each.shape
        plain = {"generator": draws, "device": "cpu"}  # the same numbers on every device
        value = torch.randint(-2, 3, shape, **plain).float() if program.exact else torch.randn(shape, **plain)
        if program.huge:
            value *= 0.1  # what the huge weight gives stays in range
        if each.name in program.held:
            value = value.to(FORMATS[program.dtype]).float()
        found.append(value.to(program.device).requires_grad_(each.grad))
    return found


def passed(program: Program, inputs: list[torch.Tensor], half: bool) -> list[Any]:
    """The arguments of a call; `half`: what a holder holds is in half precision."""
    if not program.holder:
        return inputs
    held = {name: value.to(FORMATS[program.dtype]) if half else value for name, value in zip(program.held, inputs[1:], strict=True)}
    return [inputs[0], HOLDERS[program.holder](**held)]


@dataclass
class Builder:
    """A program under construction, with the real values of its names."""

    random: random.Random
    exact: bool
    most: int = MOST_ENTRIES
    names: list[str] = field(default_factory=list)
    body: list[Statement] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    space: dict[str, Any] = field(default_factory=dict)
    holder: nn.Module = field(default_factory=nn.Module)
    attributes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        exec(SPACE, self.space)
        self.space |= PLAIN_CONTROL
        self.holder.count, self.holder.array = 0, np.ones(1, np.float32)  # type: ignore[assignment]
        self.space["self"] = self.holder

    def value(self, name: str) -> Any:
        return eval(name, self.space)

    def pick(self) -> str:
        """A name, late ones sooner."""
        return self.names[-1 - min(int(self.random.expovariate(0.8)), len(self.names) - 1)]

    def like(self, name: str, same: bool) -> str:
        """A value of the same shape, or one that broadcasts with it."""
        shape = self.value(name).shape
        fits = []
        for other in self.names:
            with contextlib.suppress(RuntimeError):
                if self.value(other).shape == shape or (not same and torch.broadcast_shapes(self.value(other).shape, shape) == shape):
                    fits.append(other)
        return self.random.choice(fits)

    def attribute(self, kind: str, made: str) -> str:
        """`self.a3`, made as said; one that exists already is shared now and then."""
        known = [name for name, source in self.attributes.items() if source == made]
        if known and self.random.random() < 0.4:
            return f"self.{self.random.choice(known)}"
        name = f"{kind}{next(self.numbers)}"
        self._make(name, made)
        return f"self.{name}"

    def _make(self, name: str, made: str) -> None:
        self.attributes[name] = made
        if made.startswith("torch."):
            self.holder.register_buffer(name, eval(made, self.space))
        else:
            setattr(self.holder, name, eval(made, self.space))
            if self.exact:
                integers(self.holder.get_submodule(name) if "Parameter" not in made else nn.ParameterList([getattr(self.holder, name)]), 0)

    def fill(self, text: str) -> str:
        """The text with names, layers and numbers for its placeholders."""
        x = self.pick()
        value = self.value(x)
        last = value.shape[-1] if value.dim() else 1
        assert last <= WIDEST or "{lin}" not in text
        weight = "torch.ones" if self.exact else "torch.randn"
        found = text.replace("{x}", x)
        for mark, make in (
            ("{y}", lambda: self.like(x, same=False)),
            ("{s}", lambda: self.like(x, same=True)),
            ("{d}", lambda: str(self.random.randrange(-value.dim(), value.dim()) if value.dim() else 0)),
            ("{k}", lambda: str(self.random.choice((1, 2, 3, -1)))),
            ("{lin}", lambda: self.attribute("a", f"nn.Linear({last}, {last})")),
            ("{w}", lambda: self.attribute("w", f"nn.Parameter({weight}({last}))")),
            ("{buf}", lambda: self.attribute("b", f"nn.Buffer(torch.ones({last}))")),
        ):
            while mark in found:
                found = found.replace(mark, make(), 1)
        for mark in ("{v}", "{u}"):
            found = found.replace(mark, f"v{next(self.numbers)}")
        return found.replace("{n}", str(next(self.numbers)))

    def module_template(self) -> Template:
        """A call of a layer with random sizes, or of one built here before."""
        value = self.value(self.pick())
        sizes = {"{L}": value.shape[-1] if value.dim() else 1, "{C}": value.shape[1] if value.dim() > 1 else 1}
        if self.random.random() < 0.75 or self.exact:
            made, exact = self.random.choice(MODULES)
            text = "{v} = {m}({x})"
        else:
            text, made = self.random.choice(PAIRED_MODULES)
            exact = 0
        for mark, size in sizes.items():
            made = made.replace(mark, str(size))
        tag = made.partition("(")[0].rpartition(".")[2]
        return Template(f"nn.{tag}", text.replace("{m}", self.attribute("m", made)), bool(exact))

    def add(self, template: Template) -> bool:
        """Try one more statement; whether it was kept."""
        before, known = dict(self.attributes), dict(self.space)
        try:
            text = self.fill(template.text)
            exec(compile(text, "<statement>", "exec"), self.space)
            names = [name for name in re.findall(r"\bv\d+\b", text) if name not in known and name in self.space]
            new = list(dict.fromkeys(names))
            assert all(self._fine(self.space[name]) for name in new)
            assert all(self._fine(self.value(name)) for name in self.names)
        except Exception:
            for name in set(self.attributes) - set(before):
                delattr(self.holder, name)
            self.attributes = before
            for name in set(self.space) - set(known):
                del self.space[name]
            return False
        reads = tuple(dict.fromkeys(name for name in self.names if re.search(rf"\b{re.escape(name)}\b", text)))
        modules = tuple((name, made) for name, made in self.attributes.items() if re.search(rf"\bself\.{name}\b", text))
        self.body.append(Statement(template.tag, text, tuple(new), reads, modules))
        self.names += [name for name in new if self.space[name].dtype == torch.float32]
        return True

    def _fine(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.numel() > self.most or not value.numel() or value.is_sparse:
            return False
        if not value.is_floating_point():
            return not value.is_complex()
        plain = value.detach()
        if self.exact and not torch.equal(plain, plain.round()):
            return False
        return bool(plain.isfinite().all()) and float(plain.abs().max()) <= (LARGEST if self.exact else 1e4)


LARGE_SCALE = 2.0**22
"""A loss scale for a loss divided by it: whatever meets fp16 without the scale is flushed to zero."""


def options_of(choose: random.Random, low: str) -> tuple[tuple[str, Any], ...]:
    found: dict[str, Any] = {"dtype": low}
    if choose.random() < 0.35:
        found["lists"] = choose.choice(("tf", "autocast", "o2", "o3"))
    if choose.random() < 0.15:
        found["cache_weights"] = choose.choice((False, "step"))
    if low == "fp16" and choose.random() < 0.3:
        found["loss_scale"] = choose.choice((8, 1024, None, "torch"))
    if low == "bf16" and choose.random() < 0.1:
        found["loss_scale"] = 8
    if choose.random() < 0.05:
        found["pad"] = "always"
    if choose.random() < 0.25:
        found["memory"] = 1e6  # so that low copies pay on tensors of any size, as they do on large ones
    return tuple(found.items())


def generate(seed: int) -> Program | None:
    """The program of a seed; None where what came out does not run in fp32 or has nothing in it."""
    choose = random.Random(seed)
    large = random.Random(f"large {seed}")  # other draws than those of small programs
    long = large.random() < 1 / 8
    exact = choose.random() < 0.55 and not long
    torch.manual_seed(seed)
    builder = Builder(choose, exact, LONG_ENTRIES if long else MOST_ENTRIES)
    shapes = _long_shapes(large.choice(LONG)) if long else SHAPES
    inputs = []
    for name in ("x", "y", "z")[: choose.choice((1, 1, 2, 2, 3))]:
        inputs.append(Input(name, choose.choice(shapes) if not inputs or choose.random() < 0.3 else inputs[0].shape, choose.random() < 0.4))
    low = choose.choice(("bf16", "fp16"))
    program = Program(seed, exact, tuple(inputs), (), (), "bare", "sum", ("grad",), options_of(choose, low))
    for each, value in zip(inputs, batch(program), strict=True):
        builder.space[each.name] = value + 0 if each.grad else value
        builder.names.append(each.name)
    kinds = list(THEMES)
    lean = choose.sample(kinds, 2)
    weights = [(6.0 if kind in lean else 0.7) + 2.0 * (kind in ("plain", "product")) for kind in kinds]
    wanted = choose.randint(2, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(60):
            if len(builder.body) >= wanted:
                break
            kind = choose.choices(kinds, weights)[0]
            template = builder.module_template() if kind == "product" and choose.random() < 0.4 else choose.choice(THEMES[kind])
            if long and large.random() < (0.3 if builder.body else 0.8):
                template = large.choice(COUNTED[0] if large.random() < 0.4 else large.choice(COUNTED))
            if template.exact or not exact:
                builder.add(template)
    if not builder.body:
        return None
    if any(each.tag.startswith("count") for each in builder.body):
        # lists that stand for others round whole numbers as those do; a few columns stand for many, on which low products pay
        kept = tuple(each for each in program.options if each[0] not in ("lists", "memory"))
        program = replace(program, options=(*kept, ("memory", 1e6)))
    results = _results(choose, builder)
    counted = [name for each in builder.body if each.tag.startswith("count") for name in each.defines]
    if counted and not any(name in result for name in counted for result in results):
        results = (*results, large.choice(counted))  # what nobody reads shows no rounding
    huge = not exact and low == "fp16" and choose.random() < 0.12
    of_range = any(each.tag.startswith(("large", "small", "nested")) for each in builder.body)
    shares = (("heavy", 0.6), ("export", 0.5 if huge or of_range else 0.05), ("verify", 0.12), ("write", 0.3))
    checks = tuple(each for each, share in shares if choose.random() < share)
    calls = choose.choice(CALLS_OF_RANGE if of_range else CALLS)
    parts = _parts(builder.body)
    again = sorted({name for each in builder.body if each.tag == "nested_checkpoint" for name, _ in each.modules} & set(parts))
    if parts and choose.random() < (0.5 if again else 0.15):
        program = replace(program, options=(*program.options, ("granularity", [choose.choice(again or parts)])))
    traced = any(each.tag in ("autograd_grad", "large_grad") for each in builder.body) and choose.random() < 0.5
    later = random.Random(f"later {seed}")  # and others again, of what was added to programs that are known
    program = _passed_on(program, builder, later)
    if program.holder:
        checks = ()
    structure, loss = choose.choice(STRUCTURES), choose.choice(LOSSES)
    gradients_inside = loss == "inner" or any("grad" in each.tag or "func" in each.text for each in builder.body)
    if low == "fp16" and seed % 3 == 1 and not (of_range or huge or gradients_inside) and "loss_scale" not in dict(program.options):
        program = replace(program, options=(*program.options, ("loss_scale", LARGE_SCALE)))
        checks = tuple(each for each in checks if each != "verify")  # its loss is not tiny
    return replace(
        program, body=tuple(builder.body), results=results, structure=structure, loss=loss,
        calls=calls, checks=checks, huge=huge, traced=traced, trained=not exact and large.random() < 0.5,
    )  # fmt: skip


def _passed_on(program: Program, builder: Builder, choose: random.Random) -> Program:
    """The program with a compiler, with padding, or with inputs in an object, now and then."""
    added: list[tuple[str, Any]] = []
    if choose.random() < 0.12:
        added.append(("backend", "aot_eager"))
    if any(each.tag in ("nn.Joined", "batch_norm") for each in builder.body) and choose.random() < 0.6:
        added += [("pad", "always"), ("memory", 1e6)]
    known = dict(added)
    program = replace(program, options=(*(each for each in program.options if each[0] not in known), *added))
    fits = len(program.inputs) > 1 and "granularity" not in dict(program.options) and not any(each.grad for each in program.inputs[1:])
    return replace(program, holder=choose.choice(list(HOLDERS))) if fits and choose.random() < 0.3 else program


def _long_shapes(size: int) -> tuple[tuple[int, ...], ...]:
    """Many places of four numbers, and, up to 2049, two rows of so many."""
    long = ((1, size, 4), (1, size, 4), (size, 4), (1, 2, size, 4))
    return long if size > 2049 else (*long, (2, size))


def _parts(body: list[Statement]) -> list[str]:
    """Layers that may be rewritten by themselves; none beside an op that must capture its bodies whole, and the layers in them."""
    if any(OPS_WITH_BODIES.search(each.text) for each in body):
        return []
    return sorted({name for each in body for name, made in each.modules if made.startswith("nn.Linear")})


def _results(choose: random.Random, builder: Builder) -> tuple[str, ...]:
    """What is returned: the last value, and now and then others, inputs, views, one value twice, None, ints."""
    made = [name for each in builder.body for name in each.defines]
    last = made[-1] if made else builder.names[-1]
    found = [last]
    for _ in range(choose.choice((0, 0, 1, 1, 2, 3))):
        kind = choose.random()
        if kind < 0.5 and made:
            found.append(choose.choice(made))
        elif kind < 0.6:
            found.append(choose.choice(builder.names))
        elif kind < 0.85:
            view = choose.choice(VIEWS)
            found.append(view.replace("{}", choose.choice((last, choose.choice(builder.names)))))
        else:
            found.append(
                choose.choice(("None", "3", "True", "len({})", "{}.shape", "{}.argmax()", "{} > 0")).replace(
                    "{}", choose.choice(builder.names)
                )
            )
    tensors = (
        [name for name in found if isinstance(builder.value(name), torch.Tensor)] if all(_runs(builder, name) for name in found) else [last]
    )
    found = [name for name in found if _runs(builder, name)]
    return tuple(found) if tensors else (last,)


def _runs(builder: Builder, text: str) -> bool:
    try:
        builder.value(text)
    except (RuntimeError, IndexError, TypeError):
        return False
    return True


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the boldest first."""
    for size in (len(program.body) // 2, 1):
        for start in range(len(program.body) - size, -1, -size) if size else ():
            cut = _without(program, start, start + size)
            if cut is not None:
                yield cut
    for index in range(len(program.results)):
        if len(program.results) > 1:
            yield replace(program, results=program.results[:index] + program.results[index + 1 :])
    for call in program.calls:
        if len(program.calls) > 1:
            yield replace(program, calls=(call,))
    for name, _ in program.options:
        if name != "dtype":
            yield replace(program, options=tuple(pair for pair in program.options if pair[0] != name))
    for index in range(len(program.checks)):
        yield replace(program, checks=program.checks[:index] + program.checks[index + 1 :])
    for structure in ("bare", "tuple"):
        if program.structure not in ("bare", structure):
            yield replace(program, structure=structure)
    if program.loss != "sum":
        yield replace(program, loss="sum")
    if program.huge:
        yield replace(program, huge=False)
    if program.traced:
        yield replace(program, traced=False)
    if program.trained:
        yield replace(program, trained=False)
    if program.holder:
        yield replace(program, holder="")
    for index, each in enumerate(program.inputs):
        if each.grad:
            yield replace(program, inputs=(*program.inputs[:index], replace(each, grad=False), *program.inputs[index + 1 :]))
        used = any(re.search(rf"\b{each.name}\b", text) for text in (*(s.text for s in program.body), *program.results))
        if not used and len(program.inputs) > 1 + bool(program.holder):
            yield replace(program, inputs=program.inputs[:index] + program.inputs[index + 1 :])
        for place, size in enumerate(each.shape):
            if size > 2:
                yield replace(program, inputs=tuple(_shrunk(other, each.shape, place) for other in program.inputs))


def _shrunk(each: Input, shape: tuple[int, ...], place: int) -> Input:
    return replace(each, shape=(*shape[:place], 2, *shape[place + 1 :])) if each.shape == shape else each


def _without(program: Program, start: int, end: int) -> Program | None:
    """The program without some statements; their names stand for what those read from then on."""
    gone, rest = program.body[start:end], program.body[end:]
    stands: dict[str, str] = {}
    for each in gone:
        source = next((stands.get(name, name) for name in each.reads), program.inputs[0].name)
        stands |= dict.fromkeys(each.defines, source)

    def renamed(text: str) -> str:
        return re.sub(r"\bv\d+\b", lambda found: stands.get(found[0], found[0]), text)

    later = tuple(replace(each, text=renamed(each.text), reads=tuple(map(renamed, each.reads))) for each in rest)
    results = tuple(dict.fromkeys(map(renamed, program.results)))
    return replace(program, body=(*program.body[:start], *later), results=results)
