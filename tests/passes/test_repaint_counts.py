"""Whole numbers that count something are not rounded on their way into a product, at the lengths at which people work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rotary import ANGLES, Rotary, product
from tiers import long_beyond
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite
from amprewrite.tables.vocabulary import Colour, Reason

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 2.0**12
"""Of the loss: fp16 flushes the gradients of a mean of thousands, under torch.autocast as well."""


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    model.zero_grad()
    (run(x).float().square().mean() * SCALE).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def ratio_to_autocast(model: nn.Module, x: Tensor, low: str) -> float:
    """The error of the gradients of a rewritten model, divided by torch.autocast's."""
    want = gradients(model, model, x)
    with torch.autocast("cpu", LOW[low]):
        auto = gradients(model, model, x)
    ours = gradients(model, amprewrite.rewrite(model, dtype=low, device="h100"), x)
    return float((ours - want).norm() / (auto - want).norm())


@pytest.mark.parametrize("low", long_beyond(1, LOW))
@pytest.mark.parametrize("turn", long_beyond(1, ["cos and sin", "complex"]))
@pytest.mark.parametrize("spelling", ANGLES)
def test_angles_of_a_thousand_positions_are_exact(spelling: str, turn: str, low: str) -> None:
    """With bare products torch.autocast rounds the angles itself, so that any ratio below one is right."""
    assert ratio_to_autocast(Rotary(ANGLES[spelling], turn=turn), torch.randn(1, 1024, 256), low) < 1.5


@pytest.mark.long
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("length", [128, 4096])
@pytest.mark.parametrize("spelling", ANGLES)
def test_angles_are_exact_at_every_length(spelling: str, length: int, low: str) -> None:
    assert ratio_to_autocast(Rotary(ANGLES[spelling]), torch.randn(1, length, 256), low) < 1.5


class Function(nn.Module):
    """A function of an input, and of a weight and buffers of the module."""

    def __init__(self, function: Callable[..., Tensor], **buffers: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.weight = function, nn.Parameter(torch.randn(64, 64) / 8)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def colours(function: Callable[..., Tensor], x: Tensor, low: str = "bf16", **buffers: Tensor) -> list[tuple[Colour, Reason]]:
    """Colour and reason of each product."""
    amp = amprewrite.rewrite(Function(function, **buffers), dtype=low, device="h100", example_inputs=(x,))
    return [(node.colour, node.reason) for node in amp.plan.nodes if node.flops]


def written(m: Function, x: Tensor, held: Tensor, numbers: Tensor | float) -> Tensor:
    """A product of the weight and of memory after a write through a view."""
    held[:, 1:] = numbers
    return held @ m.weight + x


def read_before(m: Function, x: Tensor) -> Tensor:
    """A product with positions whose memory gets other numbers later."""
    held = torch.arange(4096.0).view(64, 64)
    read = held @ m.weight
    held[:, :1] = x[:, :1]
    return read


KEPT: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]] = {
    "Fourier features": (
        lambda m, x: x @ m.weight + (torch.arange(64.0)[:, None].expand(64, 2) @ m.freq).sin(), {"freq": torch.randn(2, 64)}),
    "a learnt linear map of indices": (lambda m, x: torch.arange(4096.0).view(64, 64) @ m.weight + x, {}),
    "whole numbers in a buffer": (lambda m, x: m.places @ m.weight + x, {"places": torch.arange(4096.0).view(64, 64)}),
    "a running count": (lambda m, x: (x > 0).float().cumsum(1) @ m.weight, {}),
    "distances": (lambda m, x: (torch.arange(64)[:, None] * 64 - torch.arange(64)).float() @ m.weight + x, {}),
    "places that data choose": (lambda m, x: x.topk(64, -1).indices.float() @ m.weight, {}),
    "positions by a triangle of ones": (lambda m, x: x @ m.weight * (torch.tril(torch.ones(64, 64)) @ (x > 0).float()), {}),
    "positions by a triangle in a buffer": (
        lambda m, x: x @ m.weight * (m.ones @ (x[:, :1] > 0).float()), {"ones": torch.tril(torch.ones(64, 64))}),
    "lengths": (lambda m, x: x @ m.weight / ((x > 0).float().mT @ (x > 0).float()).clamp(min=1), {}),
    "one-hot rows counted": (lambda m, x: x @ m.weight * (F.one_hot(x.argmax(-1), 64).float() + 1).mT.mm(torch.ones(64, 1)), {}),
    "positions added to a sum of products": (lambda m, x: torch.addbmm(torch.arange(4096.0)[::64], x[None], m.weight[None]), {}),
    "distances that a bound keeps from being negative": (
        lambda m, x: (torch.arange(64)[:, None] * 64 - torch.arange(64)).clamp(min=0).float() @ m.weight + x, {}),
    "negative distances": (lambda m, x: (9 - torch.arange(4096).view(64, 64)).clamp(max=0).float() @ m.weight + x, {}),
    "even positions": (lambda m, x: (torch.arange(4096).view(64, 64) & -2).float() @ m.weight + x, {}),
    "lengths by a norm": (lambda m, x: (x > 0).float().norm(p=1, dim=1, keepdim=True) @ m.weight[:1], {}),
    "lengths by groups": (
        lambda m, x: torch.zeros(64).scatter_reduce(0, x[0].long() % 2, torch.ones(64), "sum").expand(64, 64) @ m.weight, {}),
    "positions that are written into zeros": (
        lambda m, x: written(m, x, torch.zeros(64, 64), torch.arange(4096.0).view(64, 64)[:, 1:]), {}),
    "positions that are written into new memory": (
        lambda m, x: written(m, x, torch.empty(64, 64), torch.arange(4096.0).view(64, 64)[:, 1:]), {}),
    "a far number that fills new memory": (lambda m, x: torch.empty_like(x).fill_(1001.0) @ m.weight, {}),
    "positions that are read before they are overwritten": (read_before, {}),
    "a far number in a margin": (lambda m, x: F.pad((x > 0).float(), (0, 0, 0, 9), value=1001.0) @ m.weight, {}),
    "places of the largest numbers of a mask": (lambda m, x: (x > 0).float().repeat(1, 9).topk(64, -1).indices.float() @ m.weight, {}),
    "a far number that is written into zeros": (lambda m, x: written(m, x, torch.zeros(64, 64), 1001.0), {}),
    "a tensor of one far number": (lambda m, x: torch.full((64, 64), 1001.0) @ m.weight + x, {}),
    "a tensor of one far number, like an input": (lambda m, x: torch.full_like(x, 1001.0) @ m.weight, {}),
    "far numbers in the code": (lambda m, x: torch.tensor([[1001.0, 1003.0]]) @ m.weight[:2] + x, {}),
    "positions in the dtype of an input": (lambda m, x: torch.arange(4096).view(64, 64).type_as(x) @ m.weight, {}),
    "ones like an input, added up": (lambda m, x: torch.ones_like(x).cumsum(0) @ m.weight, {}),
    "new ones, added up": (lambda m, x: x.new_ones(64, 64).cumsum(0) @ m.weight, {}),
    "scaled positions": (lambda m, x: (torch.arange(4096).view(64, 64).float() / 3) @ m.weight + x, {}),
}  # fmt: skip
FREE: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]] = {
    "a product": (lambda m, x: x @ m.weight, {}),
    "one-hot rows": (lambda m, x: F.one_hot(x.argmax(-1), 64).float() @ m.weight, {}),
    "a mask": (lambda m, x: (x > 0).float() @ m.weight, {}),
    "bytes": (lambda m, x: (x.abs() * 9).to(torch.uint8).float() / 255 @ m.weight, {}),
    "sines of positions": (lambda m, x: (torch.arange(4096.0).view(64, 64) / 99).sin() @ m.weight + x, {}),
    "weights that were packed": (
        lambda m, x: x @ (torch.bitwise_and(m.packed >> 4, 15).float() * 0.1), {"packed": torch.randint(0, 99999, (64, 64))}),
    "small whole numbers in a buffer": (lambda m, x: m.places @ m.weight + x, {"places": torch.arange(64.0).expand(64, 64).clone()}),
    "fractions in a buffer": (lambda m, x: m.places @ m.weight + x, {"places": 999 * torch.rand(64, 64)}),
    "a share by a mask": (lambda m, x: x @ m.weight * ((x > 0).float() @ m.shares), {"shares": torch.rand(64, 64)}),
    "positions between two bounds": (lambda m, x: torch.arange(4096).view(64, 64).clamp(-99, 99).float() @ m.weight + x, {}),
    "a tensor of one small number": (lambda m, x: torch.full((512, 64), 0.5) @ m.weight, {}),
    "rows of a table of one-hot rows": (lambda m, x: torch.eye(64)[x.argmax(-1)] @ m.weight, {}),
    "one-hot rows by scatter": (lambda m, x: torch.zeros(64, 64).scatter_(1, x.argmax(-1, keepdim=True), 1.0) @ m.weight, {}),
    "one-hot rows by index_put": (
        lambda m, x: torch.zeros(64, 64).index_put((torch.arange(64), x.argmax(-1)), torch.tensor(1.0)) @ m.weight, {}),
    "a mask that is written": (lambda m, x: written(m, x, torch.zeros(64, 64), (x > 0).float()[:, 1:]), {}),
    "half of a mask": (lambda m, x: x @ m.weight * ((x > 0).float() @ (x > 1).float().div(2)), {}),
    "a mask with a margin": (lambda m, x: F.pad((x > 0).float(), (0, 0, 0, 300)) @ m.weight, {}),
    "an average by a mask that is divided by lengths": (
        lambda m, x: ((x > 0).float() / (x > 0).float().sum(-1, keepdim=True)) @ (x @ m.weight), {}),
    "neighbours by their number": (lambda m, x: ((x > 0).float().sum(-1).rsqrt()[:, None] * (x > 0).float()) @ m.weight, {}),
    "directions in a buffer": (lambda m, x: x @ (m.held / m.held.norm(dim=-1, keepdim=True)) @ m.weight, {"held": torch.randn(64, 64)}),
    "an average by a mask": (lambda m, x: torch.tril(torch.ones(64, 64)) @ (x @ m.weight), {}),
    "attention with a mask of counts": (
        lambda m, x: F.scaled_dot_product_attention(*(3 * [(x @ m.weight)[None]]), attn_mask=-torch.arange(4096.0).view(64, 64)), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_a_product_of_counts_stays_high(case: str) -> None:
    function, buffers = KEPT[case]
    assert (Colour.HIGH, Reason.COUNTS) in colours(function, torch.randn(64, 64), **buffers)


def test_a_mask_is_no_factor_of_a_fused_layer_of_an_encoder() -> None:
    """The layer gets the mask as zeros and -inf, which it adds to scores."""
    layer, x, padding = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval(), torch.randn(2, 6, 16), torch.zeros(2, 6).bool()
    with torch.no_grad():
        amp = amprewrite.rewrite(layer, dtype="bf16", device="h100")
        amp(x, src_key_padding_mask=padding)
    assert [(node.op, node.colour) for node in amp.plan.nodes if node.flops] == [("_transformer_encoder_layer_fwd", Colour.LOW)]


def test_memory_with_results_of_products_holds_no_counts() -> None:
    def forward(m: Function, x: Tensor) -> Tensor:
        held = torch.zeros(64, 64)
        held[:, :32] = (x @ m.weight)[:, :32]
        return held @ held.mT

    assert {colour for colour, _ in colours(forward, torch.randn(64, 64))} == {Colour.LOW}


SIZED: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "an average by a mask": lambda m, x: torch.tril(torch.ones(len(x), len(x))) @ (x @ m.weight),
    "a part of a mask": lambda m, x: m.ones[: len(x), : len(x)] @ (x @ m.weight),
    "a mask with a margin": lambda m, x: F.pad((x > 0).float(), (0, 0, 0, 96 - len(x))) @ m.weight,
    "a resized mask": lambda m, x: F.interpolate((x > 0).float()[None], size=len(x))[0, :, :1].expand(-1, 64) @ m.weight,
    "an average by size": lambda m, x: (torch.ones(len(x), len(x)) / len(x)) @ (x @ m.weight),
    "rows of a unit matrix": lambda m, x: torch.eye(len(x)) @ (x @ m.weight),
    "one-hot rows in another shape": lambda m, x: F.one_hot(x.argmax(-1), 64).float().view(len(x) // 2, 128).view(len(x), 64) @ m.weight,
}


@pytest.mark.parametrize("case", SIZED)
def test_a_size_that_changes_is_no_count(case: str) -> None:
    amp = amprewrite.rewrite(Function(SIZED[case], ones=torch.ones(64, 64)), dtype="bf16", device="h100")
    for rows in (32, 48, 64):
        amp(torch.randn(rows, 64))
    assert {node.colour for node in amp.plan.nodes if node.flops} == {Colour.LOW}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("case", FREE)
def test_what_the_format_holds_does_not_keep_a_product_high(case: str, low: str) -> None:
    function, buffers = FREE[case]
    assert {colour for colour, _ in colours(function, torch.randn(64, 64), low, **buffers)} == {Colour.LOW}


@pytest.mark.parametrize(("low", "length"), [("bf16", 1024), ("bf16", 4097), ("fp16", 4097)])
@pytest.mark.parametrize("ones", ["made", "held"])
def test_positions_that_a_product_of_masks_counts_are_exact(ones: str, low: str, length: int) -> None:
    def places(m: Function, x: Tensor) -> Tensor:
        triangle = m.ones if ones == "held" else torch.tril(torch.ones(length, length))
        return torch.cat([x @ m.weight, triangle @ (x[:, :1] > -99).float()], 1)

    held = {"ones": torch.tril(torch.ones(length, length))} if ones == "held" else {}
    amp = amprewrite.rewrite(Function(places, **held), dtype=low, device="h100")
    assert torch.equal(amp(torch.randn(length, 64))[:, -1], torch.arange(1, length + 1).float())


@pytest.mark.parametrize("low", LOW)
def test_numbers_up_to_256_may_run_low(low: str) -> None:
    """fp16 holds whole numbers up to 2048, but not the sums of their products."""
    assert colours(lambda m, x: torch.arange(1024.0).view(16, 64) @ m.weight, torch.randn(64, 64), low)[0][0] is Colour.HIGH
    assert colours(lambda m, x: torch.arange(256.0).view(4, 64) @ m.weight, torch.randn(64, 64), low)[0][0] is Colour.LOW


def test_an_override_has_the_last_word() -> None:
    model = Function(lambda m, x: x.topk(64, -1).indices.float() @ m.weight)
    amp = amprewrite.rewrite(model, dtype="bf16", device="h100", overrides={"op:matmul": "allow"}, example_inputs=(torch.randn(64, 64),))
    assert [node.colour for node in amp.plan.nodes if node.flops] == [Colour.LOW]


def scores(summed: Callable[[Tensor, Tensor, Tensor], Tensor], checkpointed: bool = False) -> Callable[[Function, Tensor], Tensor]:
    """Attention scores of two heads, and what `summed` adds to them, (places, queries, keys): multiples of positions, as ALiBi does."""

    def forward(m: Function, x: Tensor) -> Tensor:
        keys = torch.stack([x, x.flip(-1)])
        queries, places = keys @ m.weight, torch.tensor([0.5, 0.25])[:, None, None] * torch.arange(x.shape[0])
        if checkpointed:
            return torch.utils.checkpoint.checkpoint(summed, places, queries, keys.mT, use_reentrant=False).softmax(-1) @ keys
        return summed(places, queries, keys.mT).softmax(-1) @ keys

    return forward


SUMMED: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "baddbmm": scores(torch.baddbmm),
    "a method with factors": scores(lambda places, q, k: places.baddbmm(batch1=q, batch2=k, beta=1.0, alpha=0.5)),
    "a factor of the summand": scores(lambda places, q, k: torch.baddbmm(places, q, k, beta=2)),
    "addmm": scores(lambda places, q, k: torch.stack([torch.addmm(*each) for each in zip(places, q, k, strict=True)])),
    "in a checkpoint": scores(torch.baddbmm, checkpointed=True),
}


@pytest.mark.parametrize(("low", "length"), [("bf16", 1024), ("fp16", 1024), pytest.param("fp16", 4097, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", SUMMED)
def test_a_product_runs_low_and_what_counts_is_added_in_fp32(case: str, low: str, length: int) -> None:
    """torch.autocast rounds the positions together with the scores."""
    model, x = Function(SUMMED[case]), torch.randn(length, 64)
    amp = amprewrite.rewrite(model, dtype=low, device="h100", example_inputs=(x,))
    assert {node.colour for node in amp.plan.nodes if node.flops} == {Colour.LOW}
    with torch.autocast("cpu", LOW[low]):
        auto = model(x)
    ours, theirs = ((got.float() - model(x)).norm() / model(x).norm() for got in (amp(x), auto))
    assert ours < 0.02 and ours < 0.2 * theirs
    assert ratio_to_autocast(model, x, low) < 0.2


def test_a_sum_with_what_counts_stays_whole_where_the_user_names_it() -> None:
    model, x = Function(SUMMED["baddbmm"]), torch.randn(1024, 64)
    amp = amprewrite.rewrite(model, dtype="bf16", device="h100", overrides={"op:baddbmm": "deny"}, example_inputs=(x,))
    assert [node.colour for node in amp.plan.nodes if node.op == "baddbmm"] == [Colour.HIGH]


def test_counts_reach_the_body_of_a_checkpoint() -> None:
    def forward(m: Function, x: Tensor) -> Tensor:
        places = torch.arange(4096.0).view(64, 64)
        return torch.utils.checkpoint.checkpoint(lambda x, p: p @ m.weight + x, x, places, use_reentrant=False)

    assert (Colour.HIGH, Reason.COUNTS) in colours(forward, torch.randn(64, 64, requires_grad=True))


def test_lists_that_stand_for_others_round_as_those_do() -> None:
    model = Rotary(product)
    amp = amprewrite.rewrite(model, dtype="bf16", lists="autocast", example_inputs=(torch.randn(1, 1024, 256),))
    assert {node.colour for node in amp.plan.nodes if node.op == "matmul"} == {Colour.LOW}


@pytest.mark.parametrize("low", LOW)
def test_a_fill_in_the_dtype_of_a_low_value_keeps_its_number(low: str) -> None:
    """Under torch.autocast the fill has the dtype of the value, which does not hold 4097."""

    def turned(m: Function, x: Tensor) -> Tensor:
        low_value = torch.relu(x @ m.weight) @ m.weight
        positions = low_value.new_full((1024,), 4097.0)[:, None].expand(-1, 32)
        return low_value @ m.weight + (positions @ torch.full((32, 64), 2.0**-5)).cos()

    plain, x = Function(turned), torch.randn(1024, 64)
    amp = amprewrite.rewrite(Function(turned), dtype=low, device="h100")
    torch.testing.assert_close(amp(x).float(), plain(x), rtol=0.1, atol=0.2)
    assert [node.colour for node in amp.plan.nodes if node.op == "full" and node.name == "full"] == [Colour.HIGH]
