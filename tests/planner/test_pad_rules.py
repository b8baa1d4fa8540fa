"""Every row of the table of padding rules, run on padded operands: what the padding holds must not reach the real part.

Each example is one op. Each of its ties is padded in turn. Where the rule does not contract the tie, all padding is NaN, and the
real part must come out as without; where it does, padding is zero, and so it is once more for all ties, with gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx
from torch.nn import functional as F

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.graphs.fx.ops.pad_ops import pad_dims, resize
from amprewrite.ir.op_graph import Call
from amprewrite.ir.plans.pad_plan import PadPlan
from amprewrite.ir.policies.policy import Policy, parse_pad
from amprewrite.passes import plan_region
from amprewrite.passes.apply.insert_pads import InsertPads
from amprewrite.passes.driver import read_problem
from amprewrite.passes.plan.plan_pads import layouts
from amprewrite.planner.padding.regions import Regions
from amprewrite.planner.padding.rule import MIXED, Hazard, View
from amprewrite.planner.padding.rules.table import RULES, rule_of
from amprewrite.tables.formats import BF16


def n(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(torch.float32)


def rnn(function: Callable[..., Any], gates: int, states: int) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    def call(x: torch.Tensor, h: torch.Tensor, *weights: torch.Tensor) -> Any:
        first = (h, h * 0) if states == 2 else h
        return function(x, first, weights, True, 1, 0.0, False, False, True)[0]

    return call, (n(2, 3, 6), n(1, 2, 5) * 0, n(gates * 5, 6), n(gates * 5, 5), n(gates * 5), n(gates * 5))


X, IMAGE = n(4, 6), n(2, 6, 8, 8)
EXAMPLES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    **{
        name: (getattr(torch, name), (X,))
        for name in ("relu", "neg", "abs", "sin", "cos", "tanh", "sigmoid", "erf", "exp", "expm1", "square", "atan", "sinh", "cosh",
                     "asinh", "round", "floor", "ceil", "trunc", "sign", "positive")
    },
    **{name: (getattr(F, name), (X,)) for name in ("silu", "gelu", "mish", "relu6", "hardsigmoid", "hardswish", "softsign", "tanhshrink",
                                                    "leaky_relu", "elu", "celu", "selu", "softshrink", "hardshrink")},
    **{name: (getattr(torch, name), (X.abs() + 1,)) for name in ("sqrt", "rsqrt", "log", "log2", "log10", "log1p", "reciprocal")},
    "log_sigmoid": (F.logsigmoid, (X,)),
    "dropout": (lambda x: F.dropout(x, 0.0, True), (X,)),
    "dropout1d": (lambda x: F.dropout1d(x, 0.0, True), (n(2, 6, 4),)),
    "dropout2d": (lambda x: F.dropout2d(x, 0.0, True), (IMAGE,)),
    "dropout3d": (lambda x: F.dropout3d(x, 0.0, True), (n(2, 6, 4, 4, 4),)),
    "rrelu": (lambda x: F.rrelu(x, 0.2, 0.2), (X,)),
    "prelu": (F.prelu, (IMAGE, n(6))),
    "add": (lambda a, b: torch.add(a, b, alpha=2), (X, n(6))),
    "sub": (torch.sub, (X, n(4, 6))),
    "rsub": (torch.rsub, (X, n(4, 6))),
    "mul": (torch.mul, (X, n(4, 6))),
    "div": (lambda a: a / 3, (X,)),
    "maximum": (torch.maximum, (X, n(4, 6))),
    "minimum": (torch.minimum, (X, n(4, 6))),
    "clamp": (lambda x: x.clamp(-0.5, 0.25), (X,)),
    "pow": (lambda x: x**3, (X,)),
    "where": (lambda c, a, b: torch.where(c > 0, a, b), (n(4, 1), X, n(4, 6))),
    "masked_fill": (lambda c, a: a.masked_fill(c > 0, 0.0), (n(4, 1), X)),
    "contiguous": (lambda x: x.contiguous(), (X,)),
    "clone": (torch.clone, (X,)),
    "detach": (torch.detach, (X,)),
    "_get_data_attr": (lambda x: x.data, (X,)),
    "alias": (torch.ops.aten.alias, (X,)),
    "to": (lambda x: x.to(torch.float64), (X,)),
    "type": (lambda x: x.type(torch.float64), (X,)),
    "type_as": (lambda x, y: x.type_as(y), (X, n(3))),
    "float": (lambda x: x.float(), (X,)),
    "half": (lambda x: x.half(), (X,)),
    "bfloat16": (lambda x: x.bfloat16(), (X,)),
    "view": (lambda x: x.view(4, 3, 2), (X,)),
    "reshape": (lambda x: x.reshape((2, 2, -1)), (X,)),
    "flatten": (lambda x: x.flatten(1), (IMAGE,)),
    "unflatten": (lambda x: x.unflatten(1, (2, -1)), (X,)),
    "squeeze": (lambda x: x.squeeze(1), (n(4, 1, 6),)),
    "unsqueeze": (lambda x: x.unsqueeze(1), (X,)),
    "permute": (lambda x: x.permute(0, 2, 3, 1), (IMAGE,)),
    "transpose": (lambda x: x.transpose(-1, 1), (IMAGE,)),
    "t": (lambda x: x.t(), (X,)),
    "expand": (lambda x: x.expand(3, -1, 6), (X,)),
    "broadcast_to": (lambda x: x.broadcast_to((3, 4, 6)), (X,)),
    "getitem": (lambda x: x[1:3, None, 3:6], (X,)),
    "narrow": (lambda x: x.narrow(1, 3, 3), (X,)),
    "select": (lambda x: x.select(0, 2), (X,)),
    "chunk": (lambda x: x.chunk(2, 1), (X,)),
    "split": (lambda x: x.split([4, 2], 1), (X,)),
    "unbind": (lambda x: x.unbind(0), (X,)),
    "cat": (lambda a, b: torch.cat((a, b), 1), (X, n(4, 6))),
    "stack": (lambda a, b: torch.stack((a, b), 1), (X, n(4, 6))),
    "zeros": (lambda x: torch.zeros(4, 6) + x, (X,)),
    "pad": (lambda x: F.pad(x, (1, 2)), (IMAGE,)),
    "constant_pad_nd": (lambda x: torch.constant_pad_nd(x, (1, 2)), (IMAGE,)),
    "sum": (lambda x: x.sum((2, 3), keepdim=True), (IMAGE,)),
    "mean": (lambda x: x.mean((2, -1)), (IMAGE,)),
    "batch_norm": (lambda x, m, v, w, b: F.batch_norm(x, m, v.abs() + 1, w, b), (IMAGE, n(6), n(6), n(6), n(6))),
    **{f"max_pool{d}d": (lambda x, d=d: getattr(F, f"max_pool{d}d")(x, 2), (n(2, 6, *[4] * d),)) for d in (1, 2, 3)},
    **{f"avg_pool{d}d": (lambda x, d=d: getattr(F, f"avg_pool{d}d")(x, 2), (n(2, 6, *[4] * d),)) for d in (1, 2, 3)},
    **{f"adaptive_{kind}_pool{d}d": (lambda x, d=d, kind=kind: getattr(F, f"adaptive_{kind}_pool{d}d")(x, 2), (n(2, 6, *[4] * d),))
       for d in (1, 2, 3) for kind in ("avg", "max")},
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), (IMAGE,)),
    "linear": (F.linear, (X, n(5, 6), n(5))),
    "matmul": (torch.matmul, (n(2, 4, 6), n(6, 5))),
    "mm": (torch.mm, (X, n(6, 5))),
    "bmm": (torch.bmm, (n(2, 4, 6), n(2, 6, 5))),
    "addmm": (torch.addmm, (n(5), X, n(6, 5))),
    "baddbmm": (torch.baddbmm, (n(2, 4, 5), n(2, 4, 6), n(2, 6, 5))),
    **{f"conv{d}d": (getattr(F, f"conv{d}d"), (n(2, 6, *[5] * d), n(7, 6, *[3] * d), n(7))) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": (getattr(F, f"conv_transpose{d}d"), (n(2, 6, *[5] * d), n(6, 7, *[3] * d), n(7))) for d in (1, 2, 3)},
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, (n(1, 2, 4, 6), n(1, 2, 5, 6), n(1, 2, 5, 6))),
    "einsum": (lambda a, b: torch.einsum("bik,bkj->bij", a, b), (n(2, 4, 6), n(2, 6, 5))),
    "embedding": (lambda w: F.embedding(torch.tensor([[0, 2], [4, 1]]), w), (n(7, 6),)),
    "lstm": rnn(torch.lstm, 4, 2),
    "gru": rnn(torch.gru, 3, 1),
    "rnn_tanh": rnn(torch.rnn_tanh, 1, 1),
    "rnn_relu": rnn(torch.rnn_relu, 1, 1),
    "depthwise": (lambda x, w: F.conv2d(x, w, None, 1, 1, 1, 6), (IMAGE, n(6, 1, 3, 3))),
    "batch_norm in training": (lambda x, m, v, w, b: F.batch_norm(x, m.clone(), v.abs() + 1, w, b, True), (IMAGE, n(6), n(6), n(6), n(6))),
}  # fmt: skip
OF = {"depthwise": "conv2d", "batch_norm in training": "batch_norm", "split_with_sizes": "split"}
ELSEWHERE = {
    "cast": "a planned copy: every test of test_padding has some",
    "split_with_sizes": "ATen's name for split of a list: no torch function of that name is captured",
    **dict.fromkeys(("layer_norm", "rms_norm", "group_norm", "instance_norm"), "nothing passes them"),
    **dict.fromkeys(("softmax", "log_softmax", "normalize"), "nothing passes them"),
}
CONTRACTING = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention", "lstm", "gru", "rnn_tanh",
               "rnn_relu"} | {f"conv{kind}{d}d" for kind in ("", "_transpose") for d in (1, 2, 3)}  # fmt: skip
INSIDE = {"scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"}
"""Ops that contract a dim that is also one of their results'."""


@functools.cache
def capture_once(name: str) -> tuple[torch.fx.GraphModule, list[int]]:
    """The graph of an example, and which of its arguments each graph input is.

    Its results are copied: what is returned as a view of an input, or beside another view, is never padded.
    """
    function, inputs = EXAMPLES[name]
    found: list[tuple[torch.fx.GraphModule, list[int]]] = []

    def keep(module: torch.fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        found.append((module, [next(i for i, x in enumerate(inputs) if x is g) for g in given]))
        return module.forward

    def copied(*given: torch.Tensor) -> Any:
        return torch.utils._pytree.tree_map(torch.clone, function(*given))

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(copied, backend=keep, fullgraph=True)(*inputs)
    return found[0]


def captured(name: str) -> tuple[torch.fx.GraphModule, list[int]]:
    """A copy of the graph of an example, to be padded, and which argument each graph input is."""
    module, order = capture_once(name)
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return torch.fx.GraphModule(module, graph), order


def test_every_row_has_an_example() -> None:
    assert {OF.get(name, name) for name in EXAMPLES} | set(ELSEWHERE) == set(RULES)


class Case:
    """One op, captured, with one of its ties padded by three."""

    def __init__(self, name: str, place: int) -> None:
        self.inputs = EXAMPLES[name][1]
        self.op = OF.get(name, name)
        module, self.order = captured(name)
        self.captured = read_problem(module, Policy(BF16), pad=parse_pad("always", False))
        module, calls = self.captured.module, self.captured.problem.calls  # a copy, if a result shares memory with an input
        self.call: Call = next(c for c in calls.values() if c.op == self.op and c.role == "op")
        self.regions = Regions(calls, lambda value: 1, lambda value: False)
        self.regions.build()
        rule = self.regions.rules[self.call.name]
        tie = rule.ties[place]
        slots = [p for leg in tie for p in leg if not isinstance(p, int)]
        self.contracts = self.op in CONTRACTING and (self.op in INSIDE or not any(isinstance(slot, int) for slot, _ in slots))
        axes = [self.regions._axes_of(self.call, *slot) for slot in slots]
        leaves = [leaf for leaf in self.regions.axes.leaves([a for a in axes if a is not None]) if self.regions.size_of(leaf) > 1]
        counted = self.regions.axes.leaves(self.regions.fixed[self.call.name])
        leaves = [leaf for leaf in leaves if leaf not in counted]
        self.regions.extent = {leaf: self.regions.size_of(leaf) + 3 for leaf in leaves}
        variables = [self.regions.variable(self.call.name, *slot, leaf) for slot in slots for leaf in leaves]
        for item in calls.values():  # what takes one of several results takes it as it comes
            if item.item is not None and item.refs() == (self.call.name,):
                slots = [(f"{self.call.name}#{item.item}", dim) for dim in range(len(item.shapes[0]))]
                variables += [self.regions.variable(item.name, *slot, leaf) for slot in slots for leaf in leaves]
        self.regions.padded = {v for v in variables if v is not None}
        values, copies = layouts(self.regions, {})
        plan = replace(plan_region(replace(self.captured.problem, pads_off=True)), casts=(), pads=PadPlan((), values, copies))
        self.module = module
        InsertPads()(plan, EditedGraph(module, self.captured.nodes, calls))
        module.graph.lint()
        module.recompile()

    def run(self, fill: float, *inputs: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        """Results, and the content of the padding of what the op gives, when what it reads holds `fill` there."""
        runner = _Filled(self.module, self.captured.nodes[self.call.name], fill)
        out = runner.run(*(inputs[place] for place in self.order))
        found = runner.given if isinstance(runner.given, tuple | list) else [runner.given]
        content = []
        for i, given in enumerate(found[: len(self.call.shapes)]):
            layout = self.regions.value_layout(self.call, i)
            if layout:
                content.append(given[pad_dims(torch.ones(self.call.shapes[i]), layout) == 0])
        return out, content


class _Filled(torch.fx.Interpreter):
    def __init__(self, module: torch.fx.GraphModule, target: torch.fx.Node, fill: float) -> None:
        super().__init__(module)
        self.target, self.fill, self.given = target, fill, None

    def run_node(self, n: torch.fx.Node) -> Any:
        given = super().run_node(n)
        if n is self.target:
            self.given = given
        return given

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        given = super().call_function(target, args, kwargs)
        if target is resize and args[2]:
            made = pad_dims(torch.ones_like(args[0]), args[2]) == 0
            given = torch.where(made, torch.tensor(self.fill, dtype=given.dtype), given)
        return given


def cases() -> list[Any]:
    """Names and ties: as many as the largest rule has; those that an op does not have are passed over."""
    return [pytest.param(name, id=name) for name in EXAMPLES]


def ties_of(name: str) -> int:
    calls = read_problem(captured(name)[0], Policy(BF16), pad=parse_pad("always", False)).problem.calls
    call = next(c for c in calls.values() if c.op == OF.get(name, name) and c.role == "op")
    return len(rule_of(call, calls).ties)


def flat(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [t for v in value for t in flat(v)]


@pytest.mark.parametrize("name", cases())
def test_what_padding_holds_never_reaches_the_real_part(name: str) -> None:
    ties = ties_of(name)
    assert ties
    for place in range(ties):
        case = Case(name, place)
        expected = EXAMPLES[name][0](*case.inputs)
        out, _ = case.run(0.0 if case.contracts else math.nan, *case.inputs)
        for got, want in zip(flat(out), flat(expected), strict=True):
            assert got.shape == want.shape, place
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", cases())
def test_padding_of_zeros_gives_what_the_rule_says_and_right_gradients(name: str) -> None:
    for place in range(ties_of(name)):
        case = Case(name, place)
        rule = case.regions.rules[case.call.name]
        has_pad = [value for value in case.regions.reads(case.call) if case.regions.use_layout(value, case.call.name)]
        reads: dict[str, Any] = {value.partition("#")[0]: 0.0 for value in has_pad}
        try:
            said = rule.content(reads | {v: "broadcast" for v in case.regions.reads(case.call) if v not in reads})
        except Hazard:
            continue
        statistics = (1, 2) if case.op == "batch_norm" else ()
        inputs, plain = ([x.clone().requires_grad_(i not in statistics) for i, x in enumerate(case.inputs)] for _ in range(2))
        out, content = case.run(0.0, *inputs)
        for part in content:
            if said == MIXED:
                assert torch.isfinite(part).all()
            else:
                wanted = torch.full_like(part, float(said)).float()
                torch.testing.assert_close(part.float(), wanted, rtol=1e-5, atol=0 if said == 0 else 1e-6)
        expected = EXAMPLES[name][0](*plain)
        if not any(t.requires_grad for t in flat(expected)):
            continue
        for results in (out, expected):
            sum(((t.float() + 1) ** 2).sum() for t in flat(results) if t.requires_grad).backward()
        for a, b in zip(inputs, plain, strict=True):
            assert (a.grad is None) == (b.grad is None), place
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


CONSTANT = [n for n in EXAMPLES if n in RULES and len(EXAMPLES[n][1]) == 1]


@pytest.mark.parametrize("constant", [0.5, -2.0, 3.0])
@pytest.mark.parametrize("name", CONSTANT)
def test_padding_of_a_constant_gives_what_the_rule_says(name: str, constant: float) -> None:
    case = Case(name, 0)
    rule = case.regions.rules[case.call.name]
    (read,) = [v for v in case.regions.reads(case.call) if case.captured.problem.calls[v].floating] or [""]
    try:
        said = rule.content({read: constant})
    except Hazard:
        return  # padding stops in front of it
    _, content = case.run(constant, *case.inputs)
    for part in content:
        assert torch.isfinite(part).all()
        if said != MIXED and case.call.op != "zeros":
            torch.testing.assert_close(part.float(), torch.full_like(part, float(said)).float(), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    "name, content",
    [
        ("log", 0.0), ("rsqrt", 0.0), ("reciprocal", 0.0), ("sqrt", 0.0), ("log", -1.0), ("exp", 50.0), ("square", 1e3),
        ("exp", MIXED), ("leaky_relu", math.nan),
    ],
)  # fmt: skip
def test_what_would_not_stay_finite_is_a_hazard(name: str, content: Any) -> None:
    x = Call("x", "input", shapes=((4, 6),), role="input")
    from amprewrite.ir.op_graph import Ref

    call = Call("y", name, (Ref("x"),), {}, ((4, 6),))
    rule = RULES[name](View(call, {"x": x, "y": call}))
    if content != content:
        content = MIXED
        assert rule.content({"x": content}) == MIXED
    else:
        with pytest.raises(Hazard):
            rule.content({"x": content})


def test_unknown_ops_let_nothing_pass(capture: Callable[..., torch.fx.GraphModule]) -> None:
    calls = read_problem(capture(lambda x: x.cumsum(1), X), Policy(BF16), pad=parse_pad("always", False)).problem.calls
    call = next(c for c in calls.values() if c.op == "cumsum")
    assert not rule_of(call, calls).ties and "logical size" in rule_of(call, calls).why_opaque
