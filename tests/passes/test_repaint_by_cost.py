"""The planner: cases a person can follow, and against an exhaustive search on random graphs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from chains import Case, chain, decided, letters
from torch import nn
from torch.nn import functional as F

import amprewrite
from amprewrite.ir.cost import MIXING, TICK, CostModel, elements_read, price
from amprewrite.ir.op_graph import Demand, Operand, OpNode
from amprewrite.passes.paint.paint_lists import PaintLists
from amprewrite.passes.repaint.repaint_by_cost import RepaintByCost
from amprewrite.planner.assignment import _Search
from amprewrite.report.counts import node_bytes
from amprewrite.tables.devices import CPU, CPU_BF16, H100, T4, V100
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import FP16, FP32
from amprewrite.tables.ops.op_lists import OpLists
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

BIG = 1 << 20


@pytest.mark.parametrize(
    "text, colours",
    [
        pytest.param("matmul gelu matmul", "L L L", id="what stands between two matmuls is low"),
        pytest.param("matmul softmax matmul layer_norm matmul", "L L L L L", id="internal ops need no casts"),
        pytest.param("gelu layer_norm softmax", "H H H", id="without a low op nothing is gained"),
        pytest.param("matmul relu exp", "L L H", id="where a cast costs the same on either side, fewer bytes win"),
        pytest.param("matmul relu:int64 gelu(y)", "L . H", id="integers connect nothing"),
        pytest.param(
            "matmul exp[1048576] softmax relu matmul",
            "L H H L L",
            id="deny stops at the last internal op, behind it bytes decide",
        ),
        pytest.param("m=matmul n=matmul(y) add(m,n) matmul", "L L L L", id="a sum between matmuls is low"),
        pytest.param("m=matmul add(m,y) matmul", "L H L", id="a sum with an input is not: torch.autocast keeps it in fp32"),
        pytest.param("mul[16777216] relu matmul", "L L L", id="a large input is cast before it is scaled"),
        pytest.param(
            "mul[1] relu[1] matmul[1]", "H L L", id="a tiny op is not worth its rounding, one that rounds nothing moves along"
        ),
        pytest.param("m=matmul a=relu(m) b=relu(a) exp(b)", "L L L H", id="a tail of clear ops is low up to the cast"),
        pytest.param(
            "a=mul(x) b=mul(a) c=mul(b) matmul(a) matmul(b) matmul(c)", "L L L L L L", id="one cast above beats three below"
        ),
        pytest.param("m=matmul r=relu{t}(m) s=relu{t}(m) exp(r) matmul(s)", "L L L H L", id="tied nodes move together"),
    ],
)
def test_colours(text: str, colours: str) -> None:
    assert letters(decided(text, "default")) == colours


@pytest.mark.parametrize(
    "text, node, reason, cause",
    [
        pytest.param("matmul softmax matmul", "softmax", Reason.ON_INTERNALLIST, "matmul", id="internal beside low"),
        pytest.param("matmul gelu relu matmul", "relu", Reason.CHEAPER_LOW, "gelu", id="low for the sake of casts"),
        pytest.param("mul[1] matmul[1]", "mul", Reason.CHEAPER_HIGH, "x", id="high although a low op is near"),
        pytest.param("embedding gelu relu", "gelu", Reason.MAGNIFIED, "relu", id="what is learnt is returned"),
    ],
)
def test_reasons(text: str, node: str, reason: Reason, cause: str) -> None:
    paint = decided(text, "default").paints[node]
    assert (paint.reason, paint.because_of) == (reason, cause)


def test_a_graph_without_open_nodes_is_not_modified() -> None:
    case = chain("matmul exp", "default")
    case.run(PaintLists())
    before = dict(case.paints)
    case.run(RepaintByCost())
    assert case.paints == before


def test_of_two_plans_of_one_price_the_one_with_fewer_low_ops_is_taken() -> None:
    """An open op of no elements costs the same in either format, and the copy has the same price on either side."""
    assert letters(decided("matmul relu[0] exp", "default")) in ("L H H", "L L H")
    lists = OpLists.from_sets("three", allow=["matmul"], deny=["exp"], clear=["relu"])
    case = decided("matmul[0] relu[0] exp", lists)
    assert letters(case) == "L H H"


# against an exhaustive search ---------------------------------------------------------------------------------------

LISTS = OpLists.from_sets(
    "mixed", allow=["matmul"], deny=["exp", "fmod"], clear=["relu", "cat"], infer=["div", "add", "sqrt"], internal=["softmax"]
)
ONE_OPERAND = ("matmul", "exp", "relu", "relu", "sqrt", "softmax")
TWO_OPERANDS = ("matmul", "fmod", "cat", "div", "add", "add")


def random_text(rng: random.Random) -> str:
    """Up to a dozen ops: fan-out, joins, ties, integer results, scalars, pinned and fp32-only operands, all sizes."""
    made: list[str] = ["x", "y", "w"]
    words = []
    for index in range(rng.randint(3, 12)):
        two = rng.random() < 0.45
        op = rng.choice(TWO_OPERANDS if two else ONE_OPERAND)
        reads = [rng.choice(made[-5:] if rng.random() < 0.8 else made) for _ in range(1 + two)]
        marks = [rng.choice(["", "", "", "", "", ":any", ":high", ":scalar"]) if rng.random() < 0.4 else "" for _ in reads]
        size = f"[{rng.choice([0, 1, 300, 4096, 20000, BIG])}]"
        tie = f"{{t{rng.randint(0, 1)}}}" if rng.random() < 0.2 else ""
        pin = "!" if rng.random() < 0.07 else ""
        words.append(f"n{index}={op}{size}{tie}{pin}({','.join(r + m for r, m in zip(reads, marks, strict=True))})")
        made.append(f"n{index}")
    return " ".join(words)


@dataclass
class Exhaustive:
    """All colourings of the open nodes at once, ties kept together: one bit of an array a colouring, priced from the definition."""

    case: Case
    open_names: list[str]

    def __post_init__(self) -> None:
        graph, fixed = self.case.graph, self.case.decisions.colours
        self.groups = list(dict.fromkeys(graph[name].precision_group or name for name in self.open_names))
        number = np.arange(2 ** len(self.groups))
        self.low = {name: np.full(len(number), colour is Colour.LOW) for name, colour in fixed.items()}
        for name in self.open_names:
            self.low[name] = (number >> self.groups.index(graph[name].precision_group or name)) & 1 == 1
        self.count = sum(self.low[name].astype(int) for name in self.open_names)
        self.prices = sum(self.op(node) for node in graph if node.role == "op") + sum(self.copies(node) for node in graph)

    def op(self, node: OpNode) -> np.ndarray:
        model, read = self.case.problem.costs, elements_read(self.case.graph, node)
        return np.where(self.low[node.name], model.op(node, model.low, read), model.op(node, FP32, read))

    def copies(self, value: OpNode) -> np.ndarray:
        """One copy a format and epoch; for training one gradient cast, for inference a share for operands that are promoted."""
        model, total = self.case.problem.costs, np.zeros(len(self.count), np.int64)
        for epoch in {o.write_version for node in self.case.graph for o in node.operands if o.value == value.name}:
            copied, sent, mixed = np.zeros((3, len(self.count)), bool)
            for reader in self.case.graph:
                operand = next((o for o in reader.operands if (o.value, o.write_version) == (value.name, epoch)), None)
                if operand is not None:
                    differs, needs = self.needs(reader, operand)
                    copied |= needs
                    sent |= differs & (reader.carries_fp32 or reader.role == "output")
                    if operand.demand is Demand.PROMOTE and not operand.scalar:
                        mixed |= differs & self.low[value.name]
            total += copied * model.cast(value) + sent * model.gradient_cast(value) + mixed * model.mixed_read(value)
        return total

    def needs(self, reader: OpNode, operand: Operand) -> tuple[np.ndarray, np.ndarray]:
        """Where an operand has another format than its reader computes in, and where only a copy makes it fit."""
        is_low, runs_low = self.low[operand.value], self.low[reader.name] & (operand.demand is not Demand.HIGH)
        mixing = [o for o in reader.operands if o.demand is Demand.PROMOTE and not o.scalar]
        differs = is_low != runs_low
        if operand.demand is Demand.ANY or (operand.demand is Demand.PROMOTE and operand.scalar and mixing):
            return differs & False, differs & False
        if operand not in mixing:
            return differs, differs
        smallest = min(mixing, key=lambda o: self.case.graph[o.value].numel)
        all_low = np.logical_and.reduce([self.low[o.value] for o in mixing])
        return differs, differs & (runs_low | (all_low & (operand is smallest)))

    def price_of(self, colours: dict[str, Colour]) -> tuple[int, int]:
        """Price and number of low ops of one colouring."""
        at = sum((colours[self.member(group)] is Colour.LOW) << bit for bit, group in enumerate(self.groups))
        return int(self.prices[at]), int(self.count[at])

    def member(self, group: str) -> str:
        return next(name for name in self.open_names if (self.case.graph[name].precision_group or name) == group)

    @property
    def best(self) -> tuple[int, int]:
        """The lowest price, and the fewest low ops that it takes."""
        lowest = int(self.prices.min())
        return lowest, int(self.count[self.prices == lowest].min())


def cases(seed: int, count: int, most: int) -> Iterator[tuple[str, Exhaustive]]:
    """Random programs, painted but for what is open: at most `most` nodes or ties of nodes."""
    rng = random.Random(seed)
    while count:
        case = chain(text := random_text(rng), LISTS, training=rng.random() < 0.5)
        case.know(planned_for=rng.choice((CPU, CPU_BF16, V100, T4, H100)))
        case.know(policy=replace(case.problem.policy, parity=rng.choice((None, None, 0.0, 0.3, 1.0))))
        case.run(PaintLists())
        open_names = [node.name for node in case.graph if node.name not in case.paints]
        if 2 <= len({case.graph[name].precision_group or name for name in open_names}) <= most:
            yield text, Exhaustive(case, open_names)
            count -= 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.long
def test_no_colouring_of_600_random_graphs_is_cheaper(seed: int) -> None:
    opens = 0
    for text, every in cases(seed, 600, 10):
        every.case.run(RepaintByCost())
        colours = every.case.decisions.colours
        assert every.price_of(colours) == every.best, text
        assert every.case.decisions.notes == []
        opens += len(every.groups)
    assert opens > 3 * 600  # the graphs are no trifles


@pytest.mark.parametrize("cuts", [1, 2, 3, 5])
def test_a_search_that_stops_early_tells_what_may_be_saved(cuts: int) -> None:
    early = 0
    for text, every in cases(11, 150, 8):
        graph, colours = every.case.graph, dict(every.case.decisions.colours)
        search = _Search(graph, colours, [graph[name] for name in every.open_names], every.case.problem.costs)
        side, gap = search.run(cuts)
        colours |= {name: Colour.LOW if side[vertex] else Colour.HIGH for name, vertex in search.vertices.items()}
        saved = every.price_of(colours)[0] - every.best[0]
        assert saved <= gap, text
        early += gap > 0
    assert early or cuts > 3


def test_prices_of_the_planner_are_those_of_the_definition() -> None:
    """Over all colourings that differ by a constant: what is fixed."""
    rng = random.Random(7)
    for text, every in cases(7, 40, 6):
        for number in rng.sample(range(len(every.prices)), min(12, len(every.prices))):
            colours = every.case.decisions.colours
            for name in every.open_names:
                colours[name] = Colour.LOW if every.low[name][number] else Colour.HIGH
            assert price(every.case.graph, colours, every.case.problem.costs).total == every.prices[number], text


@pytest.mark.parametrize("seed", range(20))
def test_ties_take_one_colour(seed: int) -> None:
    case = decided(random_text(random.Random(seed)), LISTS)
    for members in case.graph.precision_groups().values():
        assert len({case.paints[name].colour for name in members}) == 1


# the prices ---------------------------------------------------------------------------------------------------------


def test_training_prices_gradients_too() -> None:
    node = chain("relu", LISTS).graph["relu"]
    run, train = CostModel(CPU, FP16, False), CostModel(CPU, FP16, True)
    assert (train.gradient_cast(node), train.cast(node)) == (run.cast(node), run.cast(node))
    assert (run.gradient_cast(node), run.mixed_read(node)) == (0, round(MIXING * run.cast(node)))
    assert train.mixed_read(node) == 0
    assert train.op(node, FP16, 64) == pytest.approx(3 * run.op(node, FP16, 64), abs=2)


def test_weight_casts_are_free_where_their_copies_are_kept() -> None:
    weight = chain("matmul(x,w)", LISTS).graph["w"]
    assert CostModel(CPU, FP16, False).cast(weight) == 0
    assert CostModel(CPU, FP16, False, cached_weights=False).cast(weight) == CostModel(CPU, FP16, True).cast(weight) > 0


def test_a_copy_of_a_weight_for_one_call_costs_a_launch_and_its_bytes() -> None:
    problem = chain("matmul(x,w)", LISTS).problem
    weight, costs = problem.graph["w"], problem.costs
    assert costs.cast(weight) * TICK == pytest.approx(costs.device.launch + weight.numel * 6 / costs.device.bandwidth, rel=0.1)
    assert replace(problem, policy=replace(problem.policy, keeps_copies=True)).costs.cast(weight) == 0


def test_a_rounding_op_must_save_something_and_a_clear_op_need_not() -> None:
    model = CostModel(CPU, FP16, False)
    node = replace(chain("relu[0]", LISTS).graph["relu"], kind=OpKind.INFER)
    assert model.op(node, FP16, 0) > model.op(node, FP32, 0)
    assert model.op(replace(node, kind=OpKind.CLEAR), FP16, 0) == model.op(replace(node, kind=OpKind.CLEAR), FP32, 0)


def test_views_and_conversions_move_nothing() -> None:
    case = chain("reshape to~ relu", LISTS)
    model = CostModel(CPU, FP16, False)
    assert [model.op(case.graph[name], FP32, 64) > 0 for name in ("reshape", "to", "relu")] == [False, False, True]


def test_a_matrix_product_takes_its_flops_or_its_bytes_whichever_is_longer() -> None:
    model = CostModel(H100, FP16, False)
    small = replace(chain("matmul", LISTS).graph["matmul"], flops=10)
    large = replace(small, flops=10**13)
    assert model.op(small, FP16, 64) == model.op(replace(small, flops=0), FP16, 64)
    assert model.op(large, FP16, 64) * TICK == pytest.approx(10**13 / 989e12, rel=1e-2)
    assert model.op(large, FP32, 64) * TICK == pytest.approx(10**13 / 67e12, rel=1e-2)


class Scaled(nn.Module):
    """Arithmetic on what norms gave, far from any matmul: fastest in fp32, smallest in low."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = F.layer_norm(x, (64,)), F.layer_norm(y, (64,))
        return self.up(x * y * x * torch.sigmoid(y) * x)


def test_memory_has_a_price() -> None:
    inputs = torch.randn(16, 64), torch.randn(16, 64)
    free, dear = (amprewrite.plan(Scaled(), inputs, dtype="bf16", device="h100", memory=each) for each in (0, 100))
    sizes = [sum(node_bytes(node) for node in plan.nodes if node.role == "op") for plan in (free, dear)]
    assert sizes[1] < sizes[0]
    with torch.no_grad():
        alone = [amprewrite.plan(Scaled(), inputs, dtype="bf16", device="h100", memory=each, parity=False) for each in (0, 100)]
        shared = amprewrite.plan(Scaled(), inputs, dtype="bf16", device="h100", memory=100)
    assert alone[0].nodes == alone[1].nodes  # nothing is kept for backward
    assert shared.nodes == dear.nodes  # but where one plan serves training too, memory counts


@pytest.mark.parametrize("memory", [-1, math.inf, math.nan, "much", True])
def test_a_price_of_memory_that_is_none(memory) -> None:
    with pytest.raises(PolicyError, match="is no price; give the seconds"):
        amprewrite.rewrite(Scaled(), memory=memory)
