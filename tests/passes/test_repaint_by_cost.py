"""The planner: cases a person can follow, and against an exhaustive search on random graphs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from chains import chain, decided, letters

from amprewrite.colour import Colour, OpKind, Reason
from amprewrite.cost import FREE_PROMOTION, CostModel
from amprewrite.devices import CPU, device_row
from amprewrite.formats import FP16, FP32
from amprewrite.op_graph import Demand
from amprewrite.oplists import OpLists
from amprewrite.pass_base import run_passes
from amprewrite.passes import DECIDE
from amprewrite.passes.paint import Paint
from amprewrite.passes.repaint_by_cost import RepaintByCost
from amprewrite.program import Program

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
        pytest.param("m=matmul add(m,y) matmul", "L L L", id="a sum between two matmuls is low"),
        pytest.param("gelu[16777216] relu matmul", "L L L", id="a large input is cast before it is worked on"),
        pytest.param(
            "gelu[1] relu[1] matmul[1]", "H L L", id="a tiny op is not worth its rounding, one that rounds nothing moves along"
        ),
        pytest.param("m=matmul a=relu(m) b=relu(a) exp(b)", "L L L H", id="a tail of clear ops is low up to the cast"),
        pytest.param(
            "a=gelu(x) b=gelu(a) c=gelu(b) matmul(a) matmul(b) matmul(c)", "L L L L L L", id="one cast above beats three below"
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
        pytest.param("gelu[1] matmul[1]", "gelu", Reason.CHEAPER_HIGH, "x", id="high although a low op is near"),
        pytest.param("gelu relu", "gelu", Reason.NOT_REACHED, "x", id="no low op is near"),
    ],
)
def test_reasons(text: str, node: str, reason: Reason, cause: str) -> None:
    paint = decided(text, "default").paints[node]
    assert (paint.reason, paint.because_of) == (reason, cause)


def test_other_lists_are_not_concerned() -> None:
    program = chain("matmul relu", "tf")
    Paint()(program)
    assert not RepaintByCost()(program).modified


def test_a_graph_without_open_nodes_is_not_modified() -> None:
    program = chain("matmul exp", "default")
    Paint()(program)
    assert not RepaintByCost()(program).modified


def test_of_two_plans_of_one_price_the_one_with_fewer_low_ops_is_taken() -> None:
    """An open op of no elements costs the same in either format, and the copy has the same price on either side."""
    assert letters(decided("matmul relu[0] exp", "default")) in ("L H H", "L L H")
    lists = OpLists.from_sets("three", allow=["matmul"], deny=["exp"], clear=["relu"])
    program = decided("matmul[0] relu[0] exp", lists)
    assert letters(program) == "L H H"


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


def price(program: Program, colours: dict[str, Colour], open_names: list[str], model: CostModel) -> float:
    """Seconds of a colouring, from the docstring's rules: open ops, one copy a value and format, shares for promotion."""
    total = sum(model.op(program.graph[name], model.low if colours[name] is Colour.LOW else FP32) for name in open_names)
    for value in program.graph:
        if not value.carries_fp32:
            continue
        is_low = colours[value.name] is Colour.LOW
        low_copy = high_copy = False
        for reader in program.graph:
            for operand in reader.operands:
                if operand.value != value.name or operand.demand is Demand.ANY:
                    continue
                wants_low = colours[reader.name] is Colour.LOW and operand.demand is not Demand.HIGH
                promotes = operand.demand is Demand.PROMOTE
                if is_low and not wants_low and promotes:
                    total += FREE_PROMOTION * model.cast(value)
                elif is_low and not wants_low:
                    high_copy = True
                elif not is_low and wants_low and not (promotes and operand.scalar):
                    low_copy = True
        total += (low_copy + high_copy) * model.cast(value)
    return total


def cheapest(program: Program, open_names: list[str], model: CostModel) -> tuple[float, int]:
    """The lowest price of all colourings that keep ties together, and the fewest low ops that it takes."""
    groups: dict[str, list[str]] = {}
    for name in open_names:
        groups.setdefault(program.graph[name].tie or name, []).append(name)
    best: list[tuple[float, int]] = []
    for choice in itertools.product((Colour.HIGH, Colour.LOW), repeat=len(groups)):
        colours = program.colours
        for members, colour in zip(groups.values(), choice, strict=True):
            colours.update(dict.fromkeys(members, colour))
        best.append((price(program, colours, open_names, model), sum(colours[name] is Colour.LOW for name in open_names)))
    lowest = min(cost for cost, _ in best)
    return lowest, min(count for cost, count in best if cost <= lowest * (1 + 1e-9))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_the_cut_is_the_best_of_all_colourings(training: bool) -> None:
    rng = random.Random(1 + training)
    opens = searched = 0
    while searched < 300:
        text = random_text(rng)
        program = chain(text, LISTS, training=training)
        model = CostModel(device_row("cpu"), program.policy.low, training)
        Paint()(program)
        open_names = [node.name for node in program.graph if node.name not in program.paints]
        if not 2 <= len(open_names) <= 10:
            continue
        lowest, fewest = cheapest(program, open_names, model)
        RepaintByCost()(program)
        mine = price(program, program.colours, open_names, model)
        assert mine == pytest.approx(lowest, rel=1e-6), text
        assert sum(program.paints[name].colour is Colour.LOW for name in open_names) == fewest, text
        searched, opens = searched + 1, opens + len(open_names)
    assert opens > 4 * searched  # the graphs are no trifles


@pytest.mark.parametrize("seed", range(20))
def test_ties_take_one_colour(seed: int) -> None:
    program = decided(random_text(random.Random(seed)), LISTS)
    for members in program.graph.ties().values():
        assert len({program.paints[name].colour for name in members}) == 1


# the prices ---------------------------------------------------------------------------------------------------------


def test_training_pays_casts_twice_and_ops_three_times() -> None:
    program = chain("relu", LISTS)
    run, train = CostModel(CPU, FP16, False), CostModel(CPU, FP16, True)
    node = program.graph["relu"]
    assert train.cast(node) == pytest.approx(2 * run.cast(node))
    assert train.op(node, FP16) == pytest.approx(3 * run.op(node, FP16))


def test_a_rounding_op_must_save_something_and_a_clear_op_need_not() -> None:
    model = CostModel(CPU, FP16, False)
    node = replace(chain("relu[0]", LISTS).graph["relu"], kind=OpKind.INFER)
    assert model.op(node, FP16) > model.op(node, FP32)
    assert model.op(replace(node, kind=OpKind.CLEAR), FP16) == model.op(node, FP32) == 0


def test_the_deciding_passes_need_no_fx_graph() -> None:
    program = chain("matmul gelu matmul", "default")
    run_passes(DECIDE, program)
    assert program.module is None
