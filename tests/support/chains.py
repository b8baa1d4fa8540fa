"""Graphs of ops as text, for tests: words in, a problem out, and its colours as letters.

A text is a row of words, one word an op, in any order that names things before they are read:

    matmul gelu matmul                      each word reads the one before it, the first reads the input x
    a=matmul b=exp(a) add(a,b)              names and arguments; a word without arguments still reads the one before
    conv2d(x,w) add(w1)                     unknown names are made: w… is a parameter, k… a constant, others inputs

After the op, before its arguments: `:int64` another result dtype, `[64]` its elements, `{t}` its tie, `~` a relative cast,
`^` finite constants beyond the low range, `!` pinned high by the model. After an argument: `:scalar` 0-dim, `:any` and
`:high` another demand than the op table's, `@1` its epoch. `output(a,b)` says what is returned; without it, whatever
nobody reads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from amprewrite.ir.op_graph import Demand, Operand, OpGraph, OpNode
from amprewrite.ir.pass_base import Decisions, Painted, Pass, Problem, run_passes
from amprewrite.ir.plans.plan import Cast, RegionPlan
from amprewrite.ir.policies.policy import Policy, parse_overrides
from amprewrite.passes import decide
from amprewrite.tables.formats import FORMATS
from amprewrite.tables.ops.op_lists import OpLists, find_op, op_lists
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

LETTERS = {Colour.LOW: "L", Colour.HIGH: "H", Colour.PLAIN: "."}
NUMEL = 4096
"""Elements of every value that says nothing else: large enough that bytes count, small enough that launches do, too."""

_WORD = re.compile(r"(?:(?P<name>\w+)=)?(?P<op>\w+)(?P<flags>(?::\w+|\[\d+\]|\{\w+\}|[~^!])*)(?:\((?P<args>[^)\s]*)\))?\s+")
_ARGUMENT = re.compile(r"(?P<name>\w+)(?::(?P<demand>scalar|any|high))?(?:@(?P<epoch>\d+))?")


@dataclass
class Case:
    """A problem with what has been decided of it so far."""

    problem: Problem
    decisions: Decisions = field(default_factory=Decisions)

    def know(self, **facts: object) -> Case:
        """Exchange fields of the problem."""
        self.problem = replace(self.problem, **facts)  # type: ignore[arg-type]
        return self

    def decide(self) -> Case:
        """Run all deciding passes, from nothing."""
        self.decisions = decide(self.problem)
        return self

    def run(self, *passes: Pass[Problem, Decisions]) -> None:
        """Run these passes on what has been decided."""
        run_passes(passes, self.problem, self.decisions)

    @property
    def graph(self) -> OpGraph:
        return self.problem.graph

    @property
    def paints(self) -> dict[str, Painted]:
        return self.decisions.paints

    @property
    def casts(self) -> tuple[Cast, ...]:
        return self.decisions.casts

    @property
    def plan(self) -> RegionPlan:
        return self.decisions.freeze(self.problem)


def chain(
    text: str,
    lists: str | OpLists = "tf",
    low: str = "bf16",
    *,
    device: str = "cpu",
    training: bool = False,
    overrides: Mapping[str, str] | None = None,
) -> Case:
    """The problem of `text`, nothing decided yet."""
    fmt = FORMATS[low]
    policy = Policy(fmt, lists, parse_overrides(overrides or {}, fmt))
    found = policy.op_lists(op_lists(lists, fmt, device))
    return Case(Problem(graph=_Reader(found, device).read(text), policy=policy, lists=found, training=training, device=device))


def decided(text: str, lists: str | OpLists = "tf", low: str = "bf16", **options: object) -> Case:
    """The same, after all deciding passes."""
    return chain(text, lists, low, **options).decide()  # type: ignore[arg-type]


def letters(case: Case) -> str:
    """One letter an op, in the order of the text: L(ow), H(igh), . for what carries no fp32 value."""
    return " ".join(LETTERS[case.paints[node.name].colour] for node in case.graph if node.role == "op")


def colours(text: str, lists: str | OpLists = "tf", low: str = "bf16", **options: object) -> str:
    return letters(decided(text, lists, low, **options))


def casts(text: str, lists: str | OpLists = "tf", low: str = "bf16", **options: object) -> list[str]:
    """The planned casts as the plan prints them: "x -> bf16 for matmul"."""
    return [str(cast) for cast in decided(text, lists, low, **options).casts]


class _Reader:
    """Turns words into vertices, in the order in which they come."""

    def __init__(self, lists: OpLists, device: str) -> None:
        self.lists, self.device = lists, device
        self.nodes: dict[str, OpNode] = {}
        self.counts: Counter[str] = Counter()

    def read(self, text: str) -> OpGraph:
        position, before, returned = 0, "x", None
        text = text.strip() + " "
        while position < len(text):
            word = _WORD.match(text, position)
            if word is None:
                raise ValueError(f"no op can be read at {text[position:]!r}")
            position = word.end()
            arguments = before if word["args"] is None else word["args"]
            if word["op"] == "output":
                returned = arguments.split(",")
            else:
                before = self.add_op(word["name"] or self.numbered(word["op"]), word["op"], word["flags"], arguments)
        self.add_output(returned)
        return OpGraph.of(self.nodes.values())

    def numbered(self, op: str) -> str:
        self.counts[op] += 1
        return f"{op}_{self.counts[op] - 1}" if self.counts[op] > 1 else op

    def add_op(self, name: str, op: str, flags: str, arguments: str) -> str:
        if name in self.nodes:
            raise ValueError(f"{name!r} is made twice")
        marks = dict.fromkeys(re.findall(r"[~^!]", flags), True)
        sizes, ties, dtypes = re.findall(r"\[(\d+)\]", flags), re.findall(r"\{(\w+)\}", flags), re.findall(r":(\w+)", flags)
        dtype = dtypes[0] if dtypes else "fp32"
        kind = self.lists.kind(op)
        known = find_op(op) is not None and (kind is not None or self.lists.rule == "autocast")
        operands: list[Operand] = []
        for place, argument in enumerate(arguments.split(",") if arguments else ()):
            found = _ARGUMENT.fullmatch(argument)
            if found is None:
                raise ValueError(f"{name}: no argument can be read in {argument!r}")
            feeder = self.nodes.get(found["name"]) or self.make_source(found["name"])
            if feeder.carries_fp32 and all(o.value != feeder.name for o in operands):
                demand = self.demand(op, kind, known, place, dtype, found["demand"])
                operands.append(Operand(feeder.name, demand, found["demand"] == "scalar", int(found["epoch"] or 0)))
        pinned = None
        if dtype != "fp32":
            pinned = Colour.PLAIN, Reason.NO_FLOAT, ""
        elif "!" in marks:
            pinned = Colour.HIGH, Reason.EXPLICIT_DTYPE, "!"
        elif not known:
            pinned = Colour.HIGH, Reason.UNLISTED, op
        self.nodes[name] = OpNode(
            name,
            op,
            kind,
            tuple(operands),
            dtype,
            numel=int(sizes[0]) if sizes else NUMEL,
            pinned=pinned,
            precision_group=ties[0] if ties else "",
            relative="~" in marks,
            may_saturate="^" in marks,
        )
        return name

    def demand(self, op: str, kind: OpKind | None, known: bool, place: int, dtype: str, asked: str | None) -> Demand:
        """What the op table says of an operand: those beside the data stay fp32 where the kernel takes them so."""
        row = find_op(op)
        if asked in ("any", "high"):
            return Demand(asked)
        if row is None or not known:
            return Demand.HIGH
        if dtype != "fp32":
            return Demand.ANY if kind is OpKind.CLEAR else Demand.HIGH
        if row.data and place >= len(row.data):
            return Demand.HIGH if self.device in row.mixed_on else Demand.COLOUR
        return Demand.PROMOTE if row.promotes else Demand.COLOUR

    def make_source(self, name: str) -> OpNode:
        role = {"w": "parameter", "k": "constant"}.get(name[0], "input")
        reason = Reason.PARAMETER if role == "parameter" else Reason.BOUNDARY
        self.nodes[name] = OpNode(name, role, dtype="fp32", numel=NUMEL, role=role, pinned=(Colour.HIGH, reason, role))
        return self.nodes[name]

    def add_output(self, names: list[str] | None) -> None:
        read = {operand.value for node in self.nodes.values() for operand in node.operands}
        if names is None:
            names = [node.name for node in self.nodes.values() if node.role == "op" and node.name not in read]
        returned = [self.nodes.get(name) or self.make_source(name) for name in names]
        operands = tuple(Operand(node.name, Demand.HIGH) for node in returned if node.carries_fp32)
        self.nodes["output"] = OpNode(
            "output", "output", None, operands, role="output", pinned=(Colour.PLAIN, Reason.NO_FLOAT, "")
        )
