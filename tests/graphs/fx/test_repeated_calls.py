"""Calls of ops that are alike are tried once on fake tensors, and each node's facts are those it would have had by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import amprewrite
from amprewrite.graphs.fx.node_facts import example_value, memory_of, tensors
from amprewrite.graphs.fx.read import aliasing
from amprewrite.graphs.fx.run.repeated_calls import Alike, Answers, RepeatedCalls
from amprewrite.passes.lower.dry_run import dry_run

Block = Callable[[nn.Linear, Tensor], Tensor]


def attention(layer: nn.Linear, x: Tensor) -> Tensor:
    heads = layer(x).unflatten(-1, (2, 4)).transpose(1, 2)
    return x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)


def views(layer: nn.Linear, x: Tensor) -> Tensor:
    first, second = layer(x).chunk(2, -1)
    whole = torch.cat([second, first.contiguous()], -1)
    return x + whole[..., :8] + whole.mean(-1, keepdim=True).expand_as(x)


def in_place(layer: nn.Linear, x: Tensor) -> Tensor:
    h = layer(x)
    h += x
    F.relu(h[:, :1], inplace=True)
    return h.add_(1.0)


def turned_in_place(layer: nn.Linear, x: Tensor) -> Tensor:
    kept, turned = layer(x), layer(x).contiguous()
    turned.transpose_(1, 2)
    return x + turned.transpose(1, 2) + kept


def sizes_of_data(layer: nn.Linear, x: Tensor) -> Tensor:
    h = layer(x)
    chosen = h[h[..., 0] > 0]
    return x + chosen.sum(0) + chosen.shape[0]


def twice_the_same_operand(layer: nn.Linear, x: Tensor) -> Tensor:
    """Calls of the same forms, of one operand and of two."""
    square = layer.weight + x.mean()
    return x + torch.matmul(square, square).sum() + torch.matmul(square, square + 1.0).sum()


BLOCKS = [attention, views, in_place, turned_in_place, sizes_of_data, twice_the_same_operand]


class Blocks(nn.Module):
    """A block, several times."""

    def __init__(self, block: Block, depth: int = 3) -> None:
        super().__init__()
        self.block = block
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.block(layer, x)  # type: ignore[arg-type]
        return x


Facts = tuple[list[tuple[Any, ...]], list[tuple[int, int]]]


def facts(graph: torch.fx.Graph) -> Facts:
    """What is known of each node, and which pairs of nodes share memory."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    known = [(node.name, *((t.dtype, str(t.shape), str(t.stride())) for t in tensors(example_value(node)))) for node in nodes]
    memory = [memory_of(node) for node in nodes]
    together = [(a, b) for a in range(len(nodes)) for b in range(a) if not memory[a].isdisjoint(memory[b])]
    return known, together


def tried(model: nn.Module, dynamic: bool, monkeypatch: pytest.MonkeyPatch, alike: bool) -> Facts:
    """The facts of the graph that a rewritten model runs, with or without the knowledge of which calls are alike."""
    found: list[Facts] = []

    def trial(module: torch.fx.GraphModule, expected: dict[torch.fx.Node, torch.dtype]) -> None:
        dry_run(module, expected)
        found.append(facts(module.graph))

    with monkeypatch.context() as patch, torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        patch.setattr("amprewrite.passes.driver.dry_run", trial)
        if not alike:
            patch.setattr(Alike, "key", lambda *_: None)
        torch._dynamo.reset()
        x = torch.randn(2, 5, 8)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 1)
        amprewrite.rewrite(model, dtype="bf16")(x)
    return found[-1]


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("block", BLOCKS)
def test_facts_are_those_of_each_call_by_itself(block: Block, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Blocks(block)
    want, got = (tried(model, dynamic, monkeypatch, alike) for alike in (False, True))
    assert got == want


class Widths(nn.Module):
    """Layers of widths, heights and memory formats of their own."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Sequential(nn.Conv2d(3 + i, 4 + i, 3), nn.BatchNorm2d(4 + i), nn.GELU()) for i in range(depth))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8 + i, 9 + i), nn.LayerNorm(9 + i), nn.Tanh()) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, None, None, :].expand(-1, 3, 16, -1, -1).flatten(3)
        turned = image.contiguous(memory_format=torch.channels_last)
        for conv in self.convs:
            image, turned = conv(image), conv(turned)
        for layer in self.layers:
            x = layer(x) + layer(x.transpose(0, 1)).transpose(0, 1) + layer(x[:, ::2]).mean(1, keepdim=True)
        return x.sum() + image.sum() + turned.sum()


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_facts_are_those_of_each_call_by_itself_if_each_has_its_sizes(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Widths(3).eval()
    want, got = (tried(model, dynamic, monkeypatch, alike) for alike in (False, True))
    assert got == want


@pytest.mark.parametrize(
    "make, still", [(partial(Blocks, attention), 0), (partial(Blocks, views), 0), (partial(Blocks, in_place), 3), (Widths, 5)]
)
def test_a_later_block_makes_few_calls(make: Callable[[int], nn.Module], still: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any sizes. Ops that write are always run, and views, norms and slices for other sizes. Another width took 29 calls."""
    calls, give = [], RepeatedCalls.give

    def giving(self: RepeatedCalls, node: torch.fx.Node, value_of: Any, run: Any) -> Any:
        return give(self, node, value_of, lambda values: calls.append(node) or run(values))

    monkeypatch.setattr(RepeatedCalls, "give", giving)
    counts = []
    for depth in (3, 4):
        calls.clear()
        torch._dynamo.reset()
        amprewrite.rewrite(make(depth), dtype="bf16")(torch.randn(2, 5, 8))
        counts.append(len(calls))
    assert counts[0]
    assert counts[1] - counts[0] <= still


def test_calls_on_values_that_are_known_are_not_alike() -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(torch.neg, (graph.placeholder("x"),))
    with FakeTensorMode():
        values = {"unknown": torch.zeros(()), "known": torch.tensor(2.0)}
    keys = {name: Alike().key(node, lambda _, value=value: value) for name, value in values.items()}
    assert keys["unknown"] is not None and keys["known"] is None


def test_calls_that_are_alike_share_one_answer() -> None:
    graph, asked = torch.fx.Graph(), list[torch.fx.Node]()
    with FakeTensorMode():
        for rows in (2, 2, 3):
            given = graph.placeholder(f"x{rows}")
            given.meta["example_value"] = torch.zeros(rows, 4)
            graph.call_function(torch.tanh, (given,))
    calls = graph.find_nodes(op="call_function", target=torch.tanh)
    answers = Answers(lambda node: bool(asked.append(node) or example_value(node.all_input_nodes[0]).shape[0] == 3))
    assert [answers(call) for call in calls] == [False, False, True]
    assert asked == [calls[0], calls[2]]


class Caches(nn.Module):
    """Returns every cache with a row more, as a step of decoding does."""

    def forward(self, caches: list[Tensor], x: Tensor) -> list[Tensor]:
        return [torch.cat([cache, x], 1).tanh() if place % 2 else torch.cat([cache, x], 1) for place, cache in enumerate(caches)]


def test_caches_of_a_length_each_are_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run, tried = aliasing.real_value, list[str]()
    monkeypatch.setattr(aliasing, "real_value", lambda node, *given: tried.append(node.name) or run(node, *given))
    counts = []
    for layers in (4, 8):
        tried.clear()
        torch._dynamo.reset()
        caches = [torch.randn(2, 5, 4) for _ in range(layers)]
        for cache in caches:
            torch._dynamo.maybe_mark_dynamic(cache, 1)  # each length is a symbol of its own
        amprewrite.rewrite(Caches(), dtype="bf16")(caches, torch.randn(2, 1, 4))
        counts.append(len(tried))
    assert 0 < counts[1] == counts[0]
