"""Laws of the passes as properties over generated graphs. What a plan promises is recomputed here from the graph alone."""

from __future__ import annotations

import operator
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.fx
from chains import Case, chain, decided
from hypothesis import given, settings
from hypothesis import strategies as st

from amprewrite.ir.op_graph import Demand
from amprewrite.ir.policies.policy import Policy
from amprewrite.passes import PLAN, pipeline, plan_region
from amprewrite.passes.driver import read_problem, rewrite_graph
from amprewrite.report.cast_plan import CastPlan
from amprewrite.tables.formats import BF16
from amprewrite.tables.vocabulary import Colour, OpKind

FAST = settings(max_examples=60, deadline=None, derandomize=True)
PRESETS = ("default", "tf", "autocast", "o2", "o3")
LOW, HIGH, PLAIN = Colour

# Op graphs without torch --------------------------------------------------------------------------------------------

OPS = {
    1: ["matmul", "relu", "gelu", "exp", "softmax", "sqrt", "mean", "dropout", "my_kernel"],
    2: ["matmul", "add", "mul", "fmod", "cat", "maximum", "mse_loss"],
}


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Graphs in the language of chains.py: joins, fan-out, ties, pins, relative casts, huge values, epochs, integers."""
    names, words = ["x", "y", "w"], []
    for index in range(draw(st.integers(1, 12))):
        arity = draw(st.sampled_from((1, 1, 2)))
        op = draw(st.sampled_from(OPS[arity]))
        flags = draw(st.sampled_from(("", "", "", "", "{t}", "{u}", "!", "^", ":int64", "[1]", "[1000000]")))
        if draw(st.integers(0, 9)) == 0:
            op, arity, flags = "to", 1, "~"
        marks = [draw(st.sampled_from(("", "", "", "", ":any", ":high", ":scalar", "@1"))) for _ in range(arity)]
        reads = [draw(st.sampled_from(names)) for _ in range(arity)]
        words.append(f"n{index}={op}{flags}({','.join(r + m for r, m in zip(reads, marks, strict=True))})")
        names.append(f"n{index}")
    return " ".join(words)


@st.composite
def programs(draw: st.DrawFn) -> Case:
    text, lists, low = draw(texts()), draw(st.sampled_from(PRESETS)), draw(st.sampled_from(("bf16", "fp16")))
    return decided(text, lists, low, device=draw(st.sampled_from(("cpu", "cuda"))), training=draw(st.booleans()))


def arrives(case: Case, reader: str, value: str) -> Colour:
    """The colour in which `reader` gets `value`, casts of the plan counted in."""
    epoch = next(o.write_version for o in case.graph[reader].operands if o.value == value)
    for cast in case.casts:
        if cast.value == value and reader in cast.users and cast.write_version == epoch:
            return LOW if cast.to == case.problem.policy.low.name else HIGH
    return case.paints[value].colour


@FAST
@given(programs())
@pytest.mark.long
def test_every_operand_arrives_in_the_dtype_its_reader_computes_in(case: Case) -> None:
    for node in case.graph:
        mixed = [o for o in node.operands if o.demand is Demand.PROMOTE]
        runs = case.paints[node.name].colour
        for operand in node.operands:
            got = arrives(case, node.name, operand.value)
            if operand.demand is Demand.HIGH:
                assert got is HIGH
            elif operand.demand is Demand.COLOUR:
                assert got is (LOW if runs is LOW else HIGH)
        if mixed:
            tensors = [o for o in mixed if not o.scalar] or mixed  # 0-dim operands count only among themselves
            promoted = HIGH if any(arrives(case, node.name, o.value) is HIGH for o in tensors) else LOW
            assert promoted is (LOW if runs is LOW else HIGH)


@FAST
@given(programs())
def test_only_fp32_values_are_painted_or_cast(case: Case) -> None:
    for node in case.graph:
        assert (case.paints[node.name].colour is PLAIN) == (not node.carries_fp32)
    assert all(case.graph[cast.value].carries_fp32 for cast in case.casts)


@FAST
@given(programs())
def test_inputs_parameters_and_outputs_keep_their_dtype(case: Case) -> None:
    for node in case.graph:
        if node.role in ("input", "parameter", "constant"):
            assert case.paints[node.name].colour is HIGH
        if node.role == "output":
            assert all(arrives(case, node.name, operand.value) is HIGH for operand in node.operands)


@FAST
@given(programs())
def test_one_cast_at_most_for_a_value_a_format_and_an_epoch(case: Case) -> None:
    assert max(Counter((c.value, c.to, c.write_version) for c in case.casts).values(), default=1) == 1
    assert all(len(set(cast.users)) == len(cast.users) > 0 for cast in case.casts)


@FAST
@given(programs())
def test_casts_go_from_the_makers_format_to_the_other(case: Case) -> None:
    """So no copy is cast again: nothing goes low, high, low on one edge."""
    for cast in case.casts:
        assert (cast.to == case.problem.policy.low.name) == (case.paints[cast.value].colour is HIGH)


@FAST
@given(programs())
def test_denied_and_unknown_ops_are_never_low(case: Case) -> None:
    for node in case.graph:
        listed = node.kind is not None or case.problem.lists.rule == "autocast"
        if node.kind is OpKind.DENY or not listed:
            assert case.paints[node.name].colour is not LOW


@FAST
@given(programs())
def test_allowed_ops_are_low_unless_pinned_or_tied(case: Case) -> None:
    for node in case.graph:
        if node.kind is OpKind.ALLOW and node.pinned is None and not node.precision_group:
            assert case.paints[node.name].colour is LOW


@FAST
@given(programs())
def test_ties_have_one_colour(case: Case) -> None:
    for members in case.graph.precision_groups().values():
        assert len({case.paints[name].colour for name in members if case.graph[name].carries_fp32}) <= 1


@FAST
@given(programs())
def test_every_cause_is_a_node_and_another_one(case: Case) -> None:
    for name, paint in case.paints.items():
        assert paint.because_of == "" or (paint.because_of in case.graph.nodes and paint.because_of != name)


@FAST
@given(programs())
def test_deciding_twice_changes_nothing(case: Case) -> None:
    before = case.plan
    case.decide()
    assert case.plan == before
    case.run(*pipeline(case.problem)[:-len(PLAN)])  # painting what is painted changes nothing
    assert case.plan == before


@FAST
@given(texts(), st.sampled_from(PRESETS))
def test_deciding_edits_nothing_but_the_decisions(text: str, lists: str) -> None:
    case = chain(text, lists)
    nodes, edges, rank = dict(case.graph.nodes), sorted(case.graph.digraph.edges), dict(case.graph.rank)
    case.decide()
    assert (case.graph.nodes, sorted(case.graph.digraph.edges), case.graph.rank) == (nodes, edges, rank)
    assert case.decisions.notes == []
    assert case.problem.refused == {}


@FAST
@given(programs())
def test_a_plan_given_back_is_followed_to_the_letter(case: Case) -> None:
    plan = case.plan
    assert Case(replace(case.problem, given=plan)).decide().plan == plan


@FAST
@given(programs())
def test_plans_survive_json_and_print(case: Case) -> None:
    plan = CastPlan(case.problem.policy.low.name, (case.plan,))
    assert CastPlan.from_json(plan.to_json()) == plan
    assert all(plan.explain(node.name) for node in plan.nodes)
    assert str(plan)


# fx graphs ----------------------------------------------------------------------------------------------------------

UNARY: tuple[Callable[..., torch.Tensor], ...] = (torch.relu, torch.exp, torch.sigmoid, torch.abs, torch.neg, torch.sqrt)
BINARY: tuple[Callable[..., torch.Tensor], ...] = (torch.add, torch.mul, torch.maximum, torch.matmul, torch.fmod)


def random_module(seed: int, size: int) -> torch.fx.GraphModule:
    """An fx graph over 4x4 tensors with example values; everything in it is read, so nothing hangs on dead code."""
    rng = random.Random(seed)
    graph = torch.fx.Graph()
    made = [graph.placeholder(name) for name in ("x", "y", "w")]
    values = {node: torch.rand(4, 4) for node in made}
    for _ in range(size):
        if rng.random() < 0.15:
            pair = graph.call_function(torch.chunk, (rng.choice(made), 2))
            values[pair] = torch.chunk(values[pair.args[0]], 2)  # type: ignore[index, assignment]
            parts = [graph.call_function(operator.getitem, (pair, index)) for index in (0, 1)]
            values.update({part: values[pair][index] for index, part in enumerate(parts)})
            node = graph.call_function(torch.cat, (parts,))
            values[node] = torch.cat([values[part] for part in parts])
        else:
            function = rng.choice(UNARY if rng.random() < 0.5 else BINARY)
            reads = tuple(rng.choice(made[-6:]) for _ in range(1 if function in UNARY else 2))
            node = graph.call_function(function, reads)
            values[node] = function(*(values[read] for read in reads))
        made.append(node)
    graph.output(tuple(node for node in made if not node.users and node.op != "placeholder"))
    for node, value in values.items():
        node.meta["example_value"] = value
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def shuffled(module: torch.fx.GraphModule, rng: random.Random) -> torch.fx.GraphModule:
    """The same graph with its nodes in another order in which all makers still come before their readers, and renamed."""
    graph, mapped = torch.fx.Graph(), {}
    waiting = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    for node in (n for n in module.graph.nodes if n.op == "placeholder"):
        mapped[node] = graph.node_copy(node)
    while waiting:
        node = rng.choice([n for n in waiting if all(feeder in mapped for feeder in n.all_input_nodes)])
        waiting.remove(node)
        mapped[node] = graph.node_copy(node, mapped.__getitem__)
        mapped[node]._rename(f"v{rng.randrange(10**9)}")
    for node in (n for n in module.graph.nodes if n.op == "output"):
        graph.node_copy(node, mapped.__getitem__)
    for node, twin in mapped.items():
        twin.meta = dict(node.meta)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def plan_text(module: torch.fx.GraphModule, lists: str) -> str:
    region = plan_region(read_problem(module, Policy(BF16, lists)).problem)
    return CastPlan("bf16", (region,), lists=lists).to_json()


@pytest.mark.parametrize("lists", PRESETS)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.long
def test_a_hundred_shuffles_give_the_same_plan_byte_for_byte(seed: int, lists: str) -> None:
    module, rng = random_module(seed, 30), random.Random(seed)
    want = plan_text(module, lists)
    orders = set()
    for _ in range(100):
        other = shuffled(module, rng)
        orders.add(tuple(str(node.target) for node in other.graph.nodes))
        assert plan_text(other, lists) == want
    assert len(orders) > 50  # they were shuffled indeed


@pytest.mark.parametrize("lists", PRESETS)
@pytest.mark.parametrize("seed", range(6))
def test_a_rewritten_graph_runs_in_the_planned_dtypes(seed: int, lists: str) -> None:
    module = random_module(seed, 14)
    inputs = [torch.rand(4, 4) for _ in range(3)]
    rewritten, plan = rewrite_graph(read_problem(module, Policy(BF16, lists)))
    got: Counter[tuple[str, torch.dtype]] = Counter()

    class Observer(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):  # type: ignore[no-untyped-def]
            value = super().call_function(target, args, kwargs)
            if isinstance(value, torch.Tensor):
                got[getattr(target, "__name__", ""), value.dtype] += 1
            return value

    for out, want in zip(Observer(rewritten).run(*inputs), module(*inputs), strict=True):
        assert (out.dtype, out.shape) == (want.dtype, want.shape)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    planned = Counter((node.op, dtypes[node.dtype]) for node in plan.nodes if node.role == "op" and node.op != "chunk")
    assert got == planned


@pytest.mark.parametrize("lists", PRESETS)
@pytest.mark.parametrize("seed", range(6))
def test_rewriting_a_rewritten_graph_changes_nothing(seed: int, lists: str) -> None:
    once, _ = rewrite_graph(read_problem(random_module(seed, 14), Policy(BF16, lists)))
    twice, plan = rewrite_graph(read_problem(once, Policy(BF16, lists)))
    assert plan.casts == ()
    assert twice.code == once.code


@pytest.mark.parametrize("seed", range(6))
def test_the_captured_graph_is_never_edited(seed: int) -> None:
    module = random_module(seed, 14)
    before = module.code
    rewrite_graph(read_problem(module, Policy(BF16)))
    module.recompile()
    assert module.code == before
