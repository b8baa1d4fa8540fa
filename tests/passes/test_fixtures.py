"""Every pass has a text, `tests/passes/<pass>.txt`: what stands before it and after it, for a few small cases.

`pytest tests/passes/test_fixtures.py --update-golden` writes the texts anew; read what changed. A case begins with `==`. In one
case at least the pass must change something.

Of a deciding pass it is one line: the lists, the format, what else holds, and a row of ops as `tests/chains.py` reads them.

    == default fp16: exp gelu matmul
    before   H ? L
    after    H L L

The colours before are those that the passes in front of it gave; L(ow), H(igh), `.` no fp32 value, `?` open. Facts stand
behind a bar, as JSON: `| {"magnitudes": {"w": 1e5}}`. Casts, edits and notes are listed if the pass made some.

Of a pass over fx graphs it is a function. Its arguments are named in INPUTS below.

    == training scaled: a residual
        def f(x, w):
            return x + x @ w

Words before the colon: training, alike (over graphs), scaled, fp16, pad, masks, cuda, exported, compiled, cached, frozen (w is), and
presets of products such as fp8-all.
A deciding pass may have such cases, too.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from chains import LETTERS, Case, chain
from torch import nn
from torch.utils.checkpoint import checkpoint
from versions import differs_in_2_11

from amprewrite import passes
from amprewrite.graphs.fx.captured import Captured, EditedGraph, Reading, Target
from amprewrite.graphs.fx.weights.frozen_weight import FrozenWeight
from amprewrite.graphs.fx.weights.weight_cache import WeightCache
from amprewrite.ir.evidence.agreed import NOTHING_AGREED
from amprewrite.ir.evidence.constants import ConstantRead, Loss
from amprewrite.ir.evidence.ranges import KeepHigh, fingerprint
from amprewrite.ir.pass_base import Decisions, run_passes
from amprewrite.ir.policies.policy import Policy, parse_pad, parse_products
from amprewrite.passes import CLEAN_EXPORTED, NORMALISE, plan_region
from amprewrite.passes.driver import read_problem
from amprewrite.passes.lower.dry_run import dry_run
from amprewrite.tables import devices
from amprewrite.tables.formats import FORMATS, PRESETS
from amprewrite.tables.ops.op_lists import OpLists, op_lists
from amprewrite.tables.vocabulary import Colour, Edit, Reason

HERE = Path(__file__).parent
@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices in the texts are those of a CPU without native bf16, whatever CPU runs the tests."""
    monkeypatch.setattr(devices, "_cpu_has_bf16", lambda: False)


DECIDING = [each.name for stage in ("paint", "repaint", "plan") for each in passes.stages()[stage]]
EDITING = [each.name for stage in ("normalise", "apply", "lower") for each in passes.stages()[stage]]


OWN_LISTS = {"own": OpLists.from_sets("own", deny=["exp"], infer=["gelu"], rule="all-low")}
"""Lists of a user, beside the presets."""


# deciding passes --------------------------------------------------------------------------------------------------------


def decided(name: str, header: str, source: str) -> str:
    """The text below the header of a case of a deciding pass; with a source the graph is that of a function."""
    words, _, text = header.partition(": ")
    text, _, facts = text.partition(" | ")
    lists, low, *more = words.split()
    if source:
        return with_graph(source, "training" in more, False, lambda module: progress(name, Case(read(module, [low, *more]).problem)))
    case = chain(text, OWN_LISTS.get(lists, lists), low, training="training" in more, device="cuda" if "cuda" in more else "cpu")
    case.know(**_facts(case, json.loads(facts or "{}")))
    if "given" in more:
        case.know(given=case.decide().plan)
    return progress(name, case)


def progress(name: str, case: Case) -> str:
    """What stood before a pass, and what it added."""
    members = passes.pipeline(case.problem)
    (place,) = [place for place, each in enumerate(members) if each.name == name]
    scratch = Case(case.problem)
    scratch.run(*members[:place])
    before, colours = _written(scratch.decisions), _colours(scratch)
    scratch.run(members[place])
    lines = [f"before  {colours}", f"after   {_colours(scratch)}"]
    return "\n".join([*lines, *(line for line in _written(scratch.decisions) if line not in before)])


def _facts(case: Case, given: dict[str, Any]) -> dict[str, Any]:
    """Facts in JSON as the fields of a problem."""
    if "may_decline" in given:
        given["policy"] = replace(case.problem.policy, may_decline=given.pop("may_decline"))
    if "keep_high" in given:
        given["keep_high"] = KeepHigh({fingerprint(case.graph): given["keep_high"]})
    if "masks" in given:
        given["masks"] = {call: Edit(what) for call, what in given["masks"].items()}
    for name in ("bare_norms", "bare_taps", "far_constants", "read_by_many", "run_by_steps"):
        given |= {name: tuple(given[name])} if name in given else {}
    if "agreed" in given:
        words = given["agreed"]
        asked = (replace(node, colour=Colour(words[node.name])) for node in case.decide().plan.nodes if node.name in words)
        given["agreed"] = NOTHING_AGREED.joined(asked)
    if "constants" in given:
        given["constants"] = tuple(ConstantRead(**each | {"loss": Loss(**each["loss"])}) for each in given["constants"])
    return given


def _colours(case: Case) -> str:
    ops = (node.name for node in case.graph if node.role == "op")
    return " ".join(LETTERS[case.paints[name].colour] if name in case.paints else "?" for name in ops)


def _written(decisions: Decisions) -> list[str]:
    """What stands in the decisions beside colours."""
    painted = ((name, p) for name, p in decisions.paints.items() if p.reason is not Reason.BOUNDARY)
    return [
        *(f"why     {name}: {p.reason.value} ({p.because_of or p.detail})" for name, p in painted if p.because_of or p.detail),
        *(f"cast    {cast}" for cast in decisions.casts),
        *(f"pad     {region}" for region in decisions.pads.regions),
        *(f"product {each}" for each in decisions.quantised.products),
        *(f"fp8     {copy}" for copy in decisions.quantised.copies),
        *(f"edit    {edit}" for edit in decisions.edits),
        *(f"note    {note}" for note in decisions.notes),
    ]


# passes over fx graphs --------------------------------------------------------------------------------------------------


class Held(nn.Module):
    """A model whose forward is the function of a case; parameters come as arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def inputs() -> dict[str, torch.Tensor]:
    """By the name of the argument: x, y are inputs of 4x8, r of 4x16, q of 1x2x4x8, g of 1x8x4x8, i an image; wvobmk are parameters."""
    given = {"x": (4, 8), "y": (4, 8), "r": (4, 16), "q": (1, 2, 4, 8), "g": (1, 8, 4, 8), "i": (1, 2, 4, 4)}
    shapes: dict[str, tuple[int, ...]] = {**given, "w": (8, 8), "v": (8, 8), "o": (8, 9), "b": (8,), "m": (16, 16), "k": (16, 32)}
    return {name: nn.Parameter(torch.ones(shape)) if name in "wvobmk" else torch.ones(shape) for name, shape in shapes.items()}


def with_graph(source: str, training: bool, exported: bool, then: Callable[[torch.fx.GraphModule], str]) -> str:
    """What `then` says of the function of a case as an fx graph; during capture, when Dynamo's facts are at hand."""
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": nn.functional, "checkpoint": checkpoint}
    exec(textwrap.dedent(source), scope)
    names = re.findall(r"\w+", source.partition("(")[2].partition(")")[0])
    args = tuple(inputs()[name] for name in names)
    if exported:
        return then(torch.export.export(Held(scope["f"]), args, strict=False).module(check_guards=False))  # type: ignore[arg-type]
    said: list[str] = []

    def keep(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        said.append(then(module))
        return module.forward

    torch._dynamo.reset()
    with torch.set_grad_enabled(training):
        torch.compile(scope["f"], backend=keep, fullgraph=True)(*args)
    return said[0]


def read(module: torch.fx.GraphModule, words: list[str]) -> Captured:
    """The problem of a function."""
    training, low = "training" in words, FORMATS["fp16" if "fp16" in words else "bf16"]
    pad = parse_pad("always", False) if "pad" in words else None
    products = next((parse_products(word) for word in words if word in PRESETS), None)
    policy = Policy(low, products=products, parity=1.0 if "alike" in words else None)
    found = read_problem(
        module, policy, training=training, pad=pad, scale_loss="scaled" in words,
        fold_masks="any" if "masks" in words else "",
    )  # fmt: skip
    if "cuda" in words:
        found.know(device="cuda")
    return found


def edited(name: str, words: list[str], module: torch.fx.GraphModule) -> str:
    """The text below the source of a case of a pass over fx graphs."""
    low, training = FORMATS["fp16" if "fp16" in words else "bf16"], "training" in words
    if name in [each.name for each in (*CLEAN_EXPORTED, *NORMALISE)]:
        graph, lists = EditedGraph(module, {}), op_lists("default", low, "cpu")
        steps = CLEAN_EXPORTED if "exported" in words else NORMALISE
        return _before_and_after(name, steps, Reading(lists, low, training), graph)
    found = read(module, words)
    plan, graph = plan_region(found.problem), EditedGraph.of(found)
    if name in [each.name for each in passes.APPLY]:
        return _before_and_after(name, passes.APPLY, plan, graph)
    run_passes(passes.APPLY, plan, graph)
    expected = {graph.nodes[n.name]: FORMATS[n.dtype].dtype for n in plan.nodes if n.role == "op" and n.colour is not Colour.PLAIN}
    dry_run(graph.module, expected)
    if name in [each.name for each in passes.TIDY]:
        return _before_and_after(name, passes.TIDY, plan, graph)
    run_passes(passes.TIDY, plan, graph)
    places = enumerate(graph.module.graph.find_nodes(op="placeholder")) if "frozen" in words else ()
    frozen = {place: FrozenWeight(torch.zeros(8, 8, dtype=low.dtype), (8, 8), (8, 1)) for place, node in places if node.name == "l_w_"}
    target = Target("compiled" not in words, training, WeightCache() if "cached" in words else None, frozen)
    return _before_and_after(name, passes.LOWER, target, graph)


def _before_and_after(name: str, members: tuple[Any, ...], read: Any, graph: EditedGraph) -> str:
    (place,) = [place for place, each in enumerate(members) if each.name == name]
    run_passes(members[:place], read, graph)
    before = list(code(graph.module))
    run_passes(members[place : place + 1], read, graph)
    graph.module.graph.lint()
    after = list(code(graph.module))
    body = ["after", *(f"    {line}" for line in after)] if before != after else ["after: the same"]
    return "\n".join(["before", *(f"    {line}" for line in before), *body])


def code(module: torch.fx.GraphModule) -> Iterator[str]:
    """A line for each node, with names that say nothing of the machine."""
    for node in module.graph.nodes:
        source = getattr(node, "_dynamo_source", None)
        extra = f"  # from {source.name}" if source is not None else ""
        args = ", ".join([*map(_shown, node.args), *(f"{key}={_shown(value)}" for key, value in node.kwargs.items())])
        if node.op == "placeholder":
            yield f"{_plain(node.name)} = input{extra}"
        elif node.op == "get_attr":
            yield f"{_plain(node.name)} = attribute {_plain(str(node.target))}"
            if str(node.target).startswith("bwd_body"):
                yield from (f"    {line}" for line in code(getattr(module, str(node.target))))
        elif node.op == "output":
            yield f"return {', '.join(map(_shown, node.args[0] if isinstance(node.args[0], tuple) else node.args))}"
        else:
            target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            yield f"{_plain(node.name)} = {target}({args})"


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_shown, value))}]"
    return _plain(str(value))


def _plain(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def described(name: str, header: str, source: str) -> str:
    """The text below the header, and the source, of any case."""
    if name in DECIDING:
        return decided(name, header, source)
    words = header.partition(":")[0].split()
    return with_graph(source, "training" in words, "exported" in words, lambda module: edited(name, words, module))


def changes(body: str) -> bool:
    """Whether a pass did something in a case, by the text of it."""
    before, _, after = body.partition("\nafter")
    return after.strip() not in (": the same", before.removeprefix("before").strip())


# the texts ---------------------------------------------------------------------------------------------------------------


def cases(text: str) -> Iterator[tuple[str, str]]:
    """(header, source) of every case; what a run wrote below is left out."""
    for block in re.split(r"^== ", text, flags=re.M)[1:]:
        header, _, rest = block.partition("\n")
        source = re.match(r"(?:    .*\n|\n)*", rest)
        yield header, source[0].rstrip() if source is not None else ""


@differs_in_2_11("Dynamo names inputs otherwise", last=(2, 12))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*DECIDING, *EDITING])
def test_the_text_of_a_pass_is_what_it_does(name: str, request: pytest.FixtureRequest) -> None:
    path = HERE / f"{name.replace('-', '_')}.txt"
    assert path.is_file(), f"{path.name} is missing: write a case or two (see this file's first lines), then run with --update-golden"
    text = path.read_text()
    found = list(cases(text))
    assert found, f"{path.name} has no case"
    bodies = [described(name, header, source) for header, source in found]
    assert any(map(changes, bodies)), f"{name} does nothing in any case of {path.name}: write one in which it does"
    blocks = [f"== {header}\n" + (f"{source}\n" if source else "") + body for (header, source), body in zip(found, bodies, strict=True)]
    said = "\n\n".join(blocks) + "\n"
    if request.config.getoption("--update-golden"):
        path.write_text(said)
    assert said == text or request.config.getoption("--update-golden")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("before  H L\nafter   H L", False),
        ("before  H L\nafter   L L", True),
        ("before  H L\nafter   H L\ncast    c", True),
        ("before\n    y = relu(x)\nafter: the same", False),
        ("before\n    y = relu(x)\nafter\n    y = tanh(x)", True),
    ],
)
def test_a_case_in_which_nothing_changes_is_seen(body: str, expected: bool) -> None:
    assert changes(body) is expected


def test_every_text_is_of_a_pass() -> None:
    assert {path.stem.replace("_", "-") for path in HERE.glob("*.txt")} == {*DECIDING, *EDITING}
