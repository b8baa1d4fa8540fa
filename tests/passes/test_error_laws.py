"""The law of errors as a property over generated models: at most twice that of torch.autocast, whatever is joined, scaled or carried on.

Each model is put together from parts: what is exact and has an offset, how a product meets it, what hands that on, and what magnifies its
rounding; or where a recurrence starts, how it steps, and how its states are read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import long_beyond
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amprewrite

SOME = settings(max_examples=30, deadline=None, derandomize=True)
WIDTH, ROWS, STEPS = 64, 256, 40
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLOOR = {"bf16": 1e-2, "fp16": 2e-3}


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.gates = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.first, self.leak = nn.Parameter(torch.randn(1, WIDTH)), nn.Parameter(torch.full((WIDTH,), 4.0))
        self.small, self.table = nn.Parameter(torch.full((WIDTH,), 0.02)), nn.Embedding(8, WIDTH)
        self.how = forward

    def forward(self, *given: Tensor) -> Tensor:
        return self.how(self, *given)


def error(got: Tensor, want: Tensor) -> float:
    assert got.isfinite().all()
    return float((got.detach().float() - want.detach()).norm() / want.detach().norm())


def check(net: Net, given: tuple[Tensor, ...], dtype: str) -> None:
    """Results, and gradients of the weights that are read last, which hang on what the rest gave."""
    other, amp = copy.deepcopy(net), amprewrite.rewrite(copy.deepcopy(net), dtype=dtype)
    found = []
    for run in (net, other, amp):
        with torch.autocast("cpu", dtype=LOW[dtype], enabled=run is other):
            result = run(*given)
        result.float().pow(2).mean().backward()
        weight = dict(run.named_parameters())["b.weight"]
        found.append((result, weight.grad))
    (want, gradient), theirs, ours = found
    assert error(ours[0], want) <= max(FLOOR[dtype], 2 * error(theirs[0], want))
    assert error(ours[1], gradient) <= max(2 * FLOOR[dtype], 2 * error(theirs[1], gradient))


# exact values and products ---------------------------------------------------------------------------------------------


def _indexed(net: Net, x: Tensor, p: Tensor, mask: Tensor) -> Tensor:
    return torch.index_put(x, (torch.arange(0, ROWS, 2),), p[::2].type_as(x))


def _refined(net: Net, x: Tensor, p: Tensor, mask: Tensor) -> Tensor:
    for _ in range(3):
        x = x + torch.tanh(net.a(x - 300))
    return x


def _coupled(net: Net, x: Tensor, p: Tensor, mask: Tensor) -> Tensor:
    first, second = x, x.flip(1)
    for _ in range(4):
        first = first + 0.1 * torch.tanh(net.a(second - second.mean(1, keepdim=True)))
        second = second - 0.1 * torch.tanh(net.a(first - first.mean(1, keepdim=True)))
    return first


def _checkpointed(net: Net, x: Tensor, p: Tensor, mask: Tensor) -> Tensor:
    for _ in range(3):
        x = checkpoint(lambda t: t + torch.tanh(net.a(t - 300)), x, use_reentrant=False)
    return x


MEETINGS: dict[str, Callable[[Net, Tensor, Tensor, Tensor], Tensor]] = {
    "where": lambda net, x, p, mask: torch.where(mask, x, p),
    "cat": lambda net, x, p, mask: torch.cat([x, p])[:ROWS],
    "stack": lambda net, x, p, mask: torch.stack([x, p])[0],
    "the greater": lambda net, x, p, mask: torch.maximum(x, p),
    "the smaller": lambda net, x, p, mask: torch.minimum(x, p + 2000),
    "a bound": lambda net, x, p, mask: x.clamp(min=p),
    "written in places": _indexed,
    "added": lambda net, x, p, mask: x + p,
    "a stream": _refined,
    "a stream of checkpoints": _checkpointed,
    "coupled steps": _coupled,
    "a gate of each channel": lambda net, x, p, mask: x * torch.sigmoid(p.mean(0)),
    "a gate of each row": lambda net, x, p, mask: x * torch.sigmoid(p[:, :1]),
    "a gate spread out": lambda net, x, p, mask: x * torch.sigmoid(p[:, :1]).expand_as(x),
    "divided": lambda net, x, p, mask: x / (1 + F.softplus(p.mean(0))),
    "a mix": lambda net, x, p, mask: torch.lerp(x, x.flip(1), torch.sigmoid(p[:, :1]).float()),
    "shares": lambda net, x, p, mask: (lambda w: w[:, :1] * x + w[:, 1:] * x.flip(1))(p[:, :2].softmax(-1)),
    "a blend of each value": lambda net, x, p, mask: (lambda g: g * x + (1 - g) * x.flip(1))(torch.sigmoid(p)),
    "scaled alike": lambda net, x, p, mask: (lambda r: r * (x + p.mean()) - r * x)(F.softplus(p)),
    "distributions of bins": lambda net, x, p, mask: (lambda s: torch.erf((x - 299) / s) - torch.erf((x - 300) / s))(1 + F.softplus(p)),
}
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda s: s,
    "views": lambda s: s.view(ROWS, 4, -1).transpose(0, 1).contiguous().transpose(0, 1).reshape(ROWS, -1),
    "half of it": lambda s: s * 0.5,
    "turned": lambda s: s.flip(0).neg(),
}
MAGNIFIERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a row's mean": lambda s: s - s.mean(1, keepdim=True),
    "a channel's mean": lambda s: s - s.mean(0),
    "a layer norm": lambda s: F.layer_norm(s, (WIDTH,)),
    "a batch norm": lambda s: F.batch_norm(s, None, None, training=True),
    "a difference": lambda s: torch.cat([s[1:] - s[:-1], s[:1] - s[1:2]]),
}


@pytest.mark.long
@SOME
@given(*map(st.sampled_from, (sorted(MEETINGS), sorted(BETWEEN), sorted(MAGNIFIERS), sorted(LOW))))
def test_what_a_product_meets_keeps_its_bits(meeting: str, between: str, magnifier: str, dtype: str) -> None:
    def forward(net: Net, x: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        return net.b(MAGNIFIERS[magnifier](BETWEEN[between](MEETINGS[meeting](net, x, net.a(z), mask))))

    torch.manual_seed(1)
    check(Net(forward), (torch.randn(ROWS, WIDTH) + 300, torch.randn(ROWS, WIDTH), torch.rand(ROWS, 1) > 0.1), dtype)


LEARNT: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "rows in a norm": lambda net, ids, p: F.batch_norm(net.near(ids), None, None, training=True),
    "rows less rows": lambda net, ids, p: net.near(ids) - net.near(ids.flip(0)),
    "rows and rows turned": lambda net, ids, p: net.near(ids) + (-net.near(ids.flip(0))),
    "rows less their mean": lambda net, ids, p: net.near(ids) - net.near(ids).mean(0),
    "differences of rows": lambda net, ids, p: torch.stack([net.near(ids), net.near(ids.flip(0))]).diff(dim=0)[0],
    "moved places": lambda net, ids, p: (lambda v: v[1:] - v[:-1])(net.places + 0.05 * p),
    "what moved": lambda net, ids, p: (net.places + p) - net.places,
    "norms less a number": lambda net, ids, p: 10 * (net.sphere(ids).square().sum(-1, keepdim=True) - 64) + p,
    "a number less norms": lambda net, ids, p: p * (64 - net.sphere(ids).square().sum(-1, keepdim=True)),
}


@pytest.mark.parametrize("dtype", sorted(LOW))
@pytest.mark.parametrize("how", LEARNT)
def test_what_is_learnt_keeps_its_bits_where_it_is_taken_away(how: str, dtype: str) -> None:
    net = Net(lambda net, z, ids: net.b(LEARNT[how](net, ids, net.a(z))))
    net.near = nn.Embedding(64, WIDTH)
    rows = 8 * (1 + 0.002 * torch.randn(64, 1)) * F.normalize(torch.randn(64, WIDTH), dim=-1)
    net.sphere = nn.Embedding.from_pretrained(rows, freeze=False)
    net.places = nn.Parameter(torch.randn(ROWS, WIDTH).cumsum(0))
    with torch.no_grad():
        net.near.weight.copy_(net.near.weight[:1] + 0.03 * net.near.weight)
    torch.manual_seed(1)
    check(net, (torch.randn(ROWS, WIDTH), torch.randint(0, 64, (ROWS,))), dtype)


# averages and scores ---------------------------------------------------------------------------------------------------

HELD: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "by name": lambda net, p, mask: p.float(),
    "a gain": lambda net, p, mask: p * net.gain,
    "a mask": lambda net, p, mask: p * mask,
    "a reflection": lambda net, p, mask: F.pad(p.transpose(1, 2), (2, 2), mode="reflect").transpose(1, 2),  # on a CPU
}
MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda t: t.mean(1),
    "sum": lambda t: t.sum(1) / ROWS,
    "pool": lambda t: F.adaptive_avg_pool1d(t.transpose(1, 2), 1)[..., 0],
    "windows": lambda t: F.avg_pool1d(t.transpose(1, 2), 3, 1).transpose(1, 2),
}
TAKEN_AWAY: dict[str, Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]] = {
    "a square of the mean": lambda t, mean: 40 * (mean(t * t) - mean(t) ** 2),
    "a number": lambda t, mean: 10 * (mean(t) - 4),
    "a mean of means": lambda t, mean: (lambda m: m - m.mean(0))(mean(t.square())),
    "by a batch norm": lambda t, mean: F.batch_norm(mean(t), None, None, training=True),
}


@pytest.mark.long
@SOME
@given(*map(st.sampled_from, (sorted(HELD), sorted(MEANS), sorted(TAKEN_AWAY), sorted(LOW))))
def test_an_average_keeps_its_bits(held: str, mean: str, taken_away: str, dtype: str) -> None:
    net = Net(lambda net, z, mask: net.b(TAKEN_AWAY[taken_away](HELD[held](net, net.a(z) + 4, mask), MEANS[mean])))
    net.gain = nn.Parameter(torch.ones(WIDTH))
    torch.manual_seed(1)
    check(net, (torch.randn(16, ROWS, WIDTH), torch.ones(16, ROWS, 1)), dtype)


@pytest.mark.parametrize("dtype", sorted(LOW))
@pytest.mark.parametrize("how", ["over samples", "over parts"])
def test_an_average_keeps_its_bits_where_its_own_mean_is_taken_away(how: str, dtype: str) -> None:
    """An average of many squares is far more exact than its rounding, and its elements differ by little."""

    def forward(net: Net, z: Tensor) -> Tensor:
        squares = ((net.a(z) + 4) * net.gain).square()
        if how == "over samples":
            means = squares.mean(1)
            return net.b(means - means.mean(0))
        means = squares.unflatten(1, (8, -1)).mean(2)
        return net.b(means - means.mean(1, keepdim=True))

    net = Net(forward)
    net.gain = nn.Parameter(torch.ones(WIDTH))
    torch.manual_seed(1)
    check(net, (torch.randn(16, 4 * ROWS, WIDTH),), dtype)


@pytest.mark.parametrize("dtype", sorted(LOW))
@pytest.mark.parametrize("rows", [64, 256])
def test_a_stream_through_batch_norms_keeps_its_bits(rows: int, dtype: str) -> None:
    """All channels are made of one feature, so what the norms leave of their gradients is small."""

    def stream(net: Net, x: Tensor) -> Tensor:
        h = net.a(F.pad(x, (0, WIDTH - 1))) + net.first
        for step in (net.b, net.a, net.b):
            h = F.batch_norm(h + step(F.gelu(net.gates(h)).chunk(2, -1)[0]), None, None, training=True)
        return h

    net = Net(stream)
    found = []
    for run in (net, copy.deepcopy(net), amprewrite.rewrite(copy.deepcopy(net), dtype=dtype)):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=LOW[dtype], enabled=len(found) == 1):
            result = run(torch.randn(rows, 1))
        (result.float() * torch.arange(result.numel()).mul(1.7).sin().view_as(result)).mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in run.parameters() if p.grad is not None]))
    assert error(found[2], found[0]) <= max(FLOOR[dtype], 2 * error(found[1], found[0]))


WIDE: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "by name": lambda net, p: p.float(),
    "a gain": lambda net, p: p * net.gain,
    "a reflection": lambda net, p: F.pad(p[None], (2, 2), mode="reflect")[0, :, 2:-2],  # on a CPU
}
MAGNIFIED: dict[str, Callable[[Tensor], Tensor]] = {
    "from one": lambda y: (1 - torch.sigmoid(2 * y)) * 50,
    "to one": lambda y: (torch.sqrt(1 + (y * 0.02) ** 2) - 1) * 2000,
    "a shift and back": lambda y: (y + 500) - 500,
    "a shift and a mean": lambda y: (y + 50) - (y + 50).mean(-1, keepdim=True),
    "squares": lambda y: (lambda z: ((z * z).mean(-1) - z.mean(-1) ** 2).repeat_interleave(4, -1) * 100)(y.unflatten(-1, (-1, 4))),
    "pairs": lambda y: (y * y + y.flip(-1) * y.flip(-1) - 2 * y * y.flip(-1)) * 5,
    "a logarithm": lambda y: torch.log(1 + y * 1e-3) * 300,
    "bounds of a logarithm": lambda y: torch.log1p(-torch.sigmoid(y * 5).clamp(1e-6, 1 - 1e-6)),
    "bounds of a pole": lambda y: torch.atanh(torch.tanh(y).clamp(-1 + 1e-6, 1 - 1e-6)),
    "a product of many": lambda y: (1 + y * 1e-3).cumprod(-1),
    "a power": lambda y: ((1 + 0.01 * y) ** 100).clamp(max=100),
    "a choice": lambda y: (lambda top: torch.zeros_like(y).scatter(1, top.indices, top.values))(torch.sigmoid((y - 2) * 0.05).topk(8, -1)),
    "shares of a mean": lambda y: (F.avg_pool1d(y, 4, 4).repeat(1, 4) * 15).softmax(-1) * WIDTH,
    "shares of distances": lambda y: (-((y + 8).square() - 100)).softmax(-1) * WIDTH,
    "an area": lambda y: (F.interpolate(y[:, None], size=WIDTH // 4, mode="area")[:, 0].repeat(1, 4) * 0.01 + 3) - 3,
}


@pytest.mark.long
@SOME
@given(*map(st.sampled_from, (sorted(WIDE), sorted(MAGNIFIED), sorted(LOW))))
def test_what_autocast_holds_in_fp32_keeps_its_bits_where_they_count(wide: str, magnified: str, dtype: str) -> None:
    net = Net(lambda net, x: net.b(MAGNIFIED[magnified](WIDE[wide](net, net.a(x)))))
    net.gain = nn.Parameter(torch.full((WIDTH,), 1.1))
    net.a.bias.data.fill_(2.0)
    torch.manual_seed(1)
    check(net, (0.7 * torch.randn(ROWS, WIDTH),), dtype)


SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a prior": lambda p, x, mask: p + 3 * x - 300,
    "noise": lambda p, x, mask: (p + x) / 0.1,
    "a prior in places": lambda p, x, mask: p + torch.where(mask, 3 * x - 300, -1e9),
    "a prior, filled": lambda p, x, mask: p + (3 * x - 300).masked_fill(~mask, torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("dtype", sorted(LOW))
@pytest.mark.parametrize("scores", SCORES)
def test_an_input_among_scores_keeps_its_bits(scores: str, dtype: str) -> None:
    net = Net(lambda net, z, x, mask: net.b(SCORES[scores](net.a(z), x, mask).softmax(-1)))
    torch.manual_seed(1)
    check(net, (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.rand(ROWS, WIDTH) > 0.3), dtype)


BROADCAST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a quantiser": lambda y, s: (lambda q: (q + (q.round() - q).detach()) * s)(y / (0.1 * s)),
    "a periodic activation": lambda y, s: y + torch.sin(s * y) ** 2 / s,
    "a bounded activation": lambda y, s: torch.tanh(s * y) / s,
    "a mix with what was before": lambda y, s: y * s + y.roll(1, 0) * (1 - s),
    "in a checkpoint": lambda y, s: checkpoint(lambda t, scale: torch.tanh(scale * t) / scale, y, s, use_reentrant=False),
}


@pytest.mark.parametrize("dtype", sorted(LOW))
@pytest.mark.parametrize("read", ["an input", "a product"])
@pytest.mark.parametrize("size", [1, WIDTH])
@pytest.mark.parametrize("how", BROADCAST)
def test_gradients_of_one_weight_from_two_ops_may_cancel(how: str, size: int, read: str, dtype: str) -> None:
    net = Net(lambda net, x: net.b(BROADCAST[how](x if read == "an input" else net.a(x), net.scale)))
    found: list[list[Tensor]] = [[], [], []]
    for seed in range(4):
        torch.manual_seed(seed)
        net.scale = nn.Parameter(0.3 + 0.4 * torch.rand(size))
        x, weight = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        for place, run in enumerate((net, copy.deepcopy(net), amprewrite.rewrite(copy.deepcopy(net), dtype=dtype))):
            with torch.autocast("cpu", dtype=LOW[dtype], enabled=place == 1):
                result = run(x)
            (result.float() * weight).sum().backward()
            found[place].append(dict(run.named_parameters())["scale"].grad.clone())
        net.zero_grad()
    want, theirs, ours = map(torch.cat, found)
    assert error(ours, want) <= max(FLOOR[dtype] / 2, 1.5 * error(theirs, want))


# recurrences -----------------------------------------------------------------------------------------------------------


def _gated(net: Net, h: Tensor, u: Tensor) -> Tensor:
    gate, new = (net.gates(h) + torch.cat([u, u], -1)).chunk(2, -1)
    new = torch.tanh(new)
    return new + torch.sigmoid(gate + 4) * (h - new)


def _highway(net: Net, h: Tensor, u: Tensor) -> Tensor:
    gate, new = net.gates(h).chunk(2, -1)
    kept = torch.sigmoid(gate + 4)
    return kept * h + (1 - kept) * torch.tanh(new + u)


STARTS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "learnt": lambda net, x: net.first.expand(len(x), -1),
    "zeros": lambda net, x: torch.zeros(len(x), WIDTH),
    "an input": lambda net, x: x[:, 0],
    "a row": lambda net, x: net.table(torch.zeros(len(x), dtype=torch.long)),
    "a product": lambda net, x: net.a(x[:, 0]),
    "a product and a bias": lambda net, x: net.a(x[:, 0]) + net.first,
}
UPDATES: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "a sum": lambda net, h, u: h + u,
    "an average": lambda net, h, u: 0.98 * h + 0.02 * u,
    "a learnt average": lambda net, h, u: (lambda a: a * h + (1 - a) * u)(torch.sigmoid(net.leak)),
    "lerp": lambda net, h, u: torch.lerp(h, u.float(), 0.02) if h.dtype == torch.float32 else torch.lerp(h, u, 0.02),
    "a difference": lambda net, h, u: h - 0.05 * (h - u),
    "a gate": _gated,
    "a highway": _highway,
    "a learnt step": lambda net, h, u: h + net.small * torch.tanh(net.b(h) + u),
    "a learnt scale of shares": lambda net, h, u: h + torch.tanh(net.small) * net.b(F.layer_norm(h, (WIDTH,))),
    "a leak": lambda net, h, u: (lambda a: a * h + (1 - a) * torch.tanh(net.b(h) + u))(torch.sigmoid(net.leak)),
}
UPDATES["a choice"] = lambda net, h, u: (h[:, :, None] + net.b.weight).max(1)[0] + u
UPDATES["a smooth choice"] = lambda net, h, u: torch.logsumexp(h[:, :, None] + net.b.weight, 1) + u
READERS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "the last": lambda states: states[-1],
    "their mean": lambda states: torch.stack(states, 1).mean(1),
    "steps": lambda states: (lambda all_of: (all_of[:, 1:] - all_of[:, :-1]).sum(1))(torch.stack(states, 1)),
}


@pytest.mark.long
@SOME
@given(*map(st.sampled_from, (sorted(STARTS), sorted(UPDATES), sorted(READERS), sorted(LOW))))
def test_what_is_carried_on_keeps_its_bits(start: str, update: str, reader: str, dtype: str) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        u, h, states = net.a(x), STARTS[start](net, x), []
        for t in range(STEPS):
            h = UPDATES[update](net, h, u[:, t])
            states.append(h)
        return net.b(READERS[reader](states))

    torch.manual_seed(1)
    check(Net(forward), (torch.randn(16, STEPS, WIDTH),), dtype)


# shares ----------------------------------------------------------------------------------------------------------------

SHARES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda t: t.softmax(-1),
    "a mix of two": lambda t: 0.5 * torch.sigmoid(t) + 0.5 * t.softmax(-1),
}
SEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "as they are": lambda p: p,
    "within bounds": lambda p: p.clamp(1e-7, 1 - 1e-7),
    "scaled": lambda p: p * 0.9,
    "as a row": lambda p: p.reshape(-1),
}


@pytest.mark.parametrize("dtype", sorted(LOW))
@pytest.mark.parametrize("lists", long_beyond(1, ["default", "o2"]))
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("shares", SHARES)
def test_a_loss_of_probabilities_sees_them_in_fp32(shares: str, seen: str, lists: str, dtype: str) -> None:
    """torch.autocast refuses this loss. What counts is the error of a model that a product alone rounds."""

    def forward(net: Net, x: Tensor, target: Tensor) -> Tensor:
        scores = net.b(x)
        scores = scores.float() if scores.dtype is LOW[dtype] else scores
        with torch.autocast("cpu", enabled=False):
            return F.binary_cross_entropy(SEEN[seen](SHARES[shares](20 * scores)), target)

    net = Net(lambda net, x, target: F.binary_cross_entropy(SEEN[seen](SHARES[shares](20 * net.b(x))), target))
    torch.manual_seed(1)
    given = torch.randn(ROWS, WIDTH), SEEN["as a row" if seen == "as a row" else "as they are"]((torch.rand(ROWS, WIDTH) > 0.5).float())
    amp, by_hand = amprewrite.rewrite(copy.deepcopy(net), dtype=dtype, lists=lists, loss_scale=None), copy.deepcopy(net)
    want, got = net(*given), amp(*given)
    with torch.autocast("cpu", dtype=LOW[dtype]):
        other = forward(by_hand, *given)
    gradients = []
    for result, run in ((want, net), (got, amp), (other, by_hand)):
        result.backward()
        gradients.append(dict(run.named_parameters())["b.weight"].grad)
    assert error(got, want) <= max(FLOOR[dtype], 2 * error(other, want))
    assert error(gradients[1], gradients[0]) <= max(FLOOR[dtype], 2 * error(gradients[2], gradients[0]))


@pytest.mark.parametrize("dtype", sorted(LOW))
def test_so_does_a_loss_outside(dtype: str) -> None:
    net = Net(lambda net, x: torch.sigmoid(20 * net.b(x)))
    x, target = torch.randn(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    want, got = (F.binary_cross_entropy(run(x), target) for run in (net, amprewrite.rewrite(copy.deepcopy(net), dtype=dtype)))
    assert error(got, want) < 2e-2


@pytest.mark.parametrize("dtype", sorted(LOW))
def test_a_logarithm_sees_what_is_left_of_one(dtype: str) -> None:
    """As in losses of adversarial networks; torch.autocast gives infinities here."""
    net = Net(lambda net, x: (1 - torch.sigmoid(4 * net.b(x) + 4)).log())
    x = torch.randn(ROWS, WIDTH)
    assert error(amprewrite.rewrite(copy.deepcopy(net), dtype=dtype)(x), net(x)) < FLOOR[dtype]
