"""Decisions that rest on how large weights are follow the weights."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.ir.evidence.range_rules import Fit, fit
from amprewrite.runtime.weights.weight_reads import Known, Schedule, moved
from amprewrite.tables.errors import AmpRewriteWarning
from amprewrite.tables.formats import FP16
from amprewrite.tables.vocabulary import Colour


class Net(nn.Module):
    def __init__(self, std: float = 0.2, act: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.act = act
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 4)
        nn.init.normal_(self.up.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


def colours(amp: Any) -> dict[str, str]:
    return {node.module: node.colour.value for node in amp.plan.nodes if node.op == "linear"}


def batch(step: int = 0) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_weights_that_grow_into_range_run_low_in_the_end(backend):
    """As transformers initialises the vision layers of BLIP and SAM."""
    model = Net(std=1e-10)
    amp = amprewrite.rewrite(model, dtype="fp16", backend=backend)
    optimizer = torch.optim.Adam(amp.parameters(), lr=1e-2)
    seen = []
    for step in range(20):
        optimizer.zero_grad()
        amp(batch(step)).square().mean().backward()
        optimizer.step()
        seen.append(colours(amp)["up"])
    assert seen[0] == "high" and seen[-1] == "low"
    assert "up.weight has come to" in str(amp.plan)
    assert error(amp(batch()), model(batch())) < 5e-3


@pytest.mark.parametrize(
    ("act", "fused", "grows_at", "steps"),
    [
        pytest.param(torch.relu, False, 4, 8, id="the host sees the skip"),
        pytest.param(torch.relu, True, 65, 125, id="a fused optimizer, before training is given up"),
        pytest.param(torch.tanh, False, 4, 17, id="an overflow that saturates is seen at a look"),
    ],
)
def test_weights_that_grow_beyond_range_stop_overflowing(act, fused, grows_at, steps):
    model = Net(act=act)
    amp = amprewrite.rewrite(model, dtype="fp16", loss_scale=64.0)
    optimizer = torch.optim.SGD(amp.parameters(), lr=1e-6, fused=fused)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            if step == grows_at:
                with torch.no_grad():
                    model.up.weight[0, 0] = 1e5
            optimizer.zero_grad()
            out = amp(batch(step) * 1e-3)
            out.square().mean().backward()
            optimizer.step()
    assert out.isfinite().all() and colours(amp) == {"up": "high", "down": "low"}
    assert amp.loss_scale.report().consecutive_skips == 0
    assert (amp.loss_scale.report().skipped > 0) == (act is torch.relu)
    said = [str(w.message) for w in caught if issubclass(w.category, AmpRewriteWarning)]
    assert len(said) == 1 and "up.weight has come to 1e+05" in said[0] and "65504" in said[0]


@pytest.mark.parametrize("how", ["eval", "train", "load_state_dict"])
def test_a_switch_of_modes_or_a_loaded_state_is_worth_a_look(how):
    model = Net()
    amp = amprewrite.rewrite(model, dtype="fp16").train(how == "eval")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    state["up.weight"][0, 0] = 1e5
    with torch.no_grad():
        amp(batch())
        if how == "load_state_dict":
            amp.load_state_dict(state)
        else:
            model.up.weight.copy_(state["up.weight"])
            amp.train(how == "train")
        with pytest.warns(AmpRewriteWarning, match=r"up\.weight has come to"):
            out = amp(batch())
        assert error(out, model(batch())) < 5e-3
        amp(batch())
    assert colours(amp) == {"up": "high", "down": "low"}


def test_what_graphs_agreed_on_for_small_weights_ends_with_the_graph_that_saw_them():
    """A hook has the graph captured anew that kept a layer high, when the weight fits already; another graph followed it."""
    model = Net(std=1e-10)
    amp = amprewrite.rewrite(model, dtype="fp16")
    amp(batch())
    with torch.no_grad():
        model.up.weight.normal_(std=0.2)
        amp(batch())  # agrees with the graph for training
    amp.up.register_forward_hook(lambda *_: None)
    amp(batch())
    assert colours(amp)["up"] == "high"
    amp.eval()
    amp(batch())
    assert colours(amp)["up"] == "low"


def test_so_does_what_they_agreed_on_before_another_layer_overflowed():
    """An overflow has all graphs captured anew. What they take over still rests on a weight that has grown by then."""
    model = Net(std=1e-10, act=lambda t: t)
    amp = amprewrite.rewrite(model, dtype="fp16")
    amp(batch())
    with torch.no_grad():
        amp(batch())
        model.up.weight.normal_(std=0.2)
        model.down.weight.fill_(6e4)
        amp(batch())  # overflows in this graph, and the other one is outdated
    amp(batch())
    assert colours(amp) == {"up": "high", "down": "high"}
    amp.eval()
    amp(batch())
    assert colours(amp)["up"] == "low"


def test_what_does_not_change_sides_is_not_captured_anew():
    model = Net()
    amp = amprewrite.rewrite(model, dtype="fp16")
    optimizer = torch.optim.SGD(amp.parameters(), lr=1e-3)
    entry = amp._amprewrite_session.entries[""]
    amp(batch())
    before = entry.graphs
    for step in range(40):
        amp.train(step % 3 > 0)
        optimizer.zero_grad()
        amp(batch(step)).square().mean().backward()
        optimizer.step()
    assert entry.graphs is before


class Biased(nn.Module):
    """Adds biases to a convolution and to products, under a checkpoint if asked, and has a norm."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.conv, self.up, self.norm = nn.Conv1d(8, 16, 1), nn.Linear(16, 16), nn.LayerNorm(16)
        self.down, self.bias = nn.Parameter(torch.randn(16, 4) / 4), nn.Parameter(torch.zeros(4))

    def inner(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.up(torch.tanh(self.conv(x.unflatten(-1, (8, 2))).mean(-1)))))
        return torch.addmm(self.bias, x, self.down)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)

    def set_biases(self, size: float) -> None:
        with torch.no_grad():
            for bias in (self.conv.bias, self.up.bias, self.bias, self.norm.bias):
                bias.fill_(size)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_bias_may_be_flushed(checkpointed):
    """Those of attention's keys have next to no gradient: they start at zero, and come to 1e-12 in training."""
    model = Biased(checkpointed)
    amp = amprewrite.rewrite(model, dtype="fp16")
    entry = amp._amprewrite_session.entries[""]
    amp(batch())
    before = entry.graphs
    for size in (1e-12, 0.0, 1e-9, 1.0, 1e-12):
        model.set_biases(size)
        amp.train(not amp.training)
        assert error(amp(batch()), model(batch())) < 2e-3
        amp.train()
        amp(batch())
    assert entry.graphs is before
    nodes = [node for region in amp.plan.regions for part in region.flat("") for node in part.nodes]
    assert {node.colour for node in nodes if node.op in ("conv1d", "linear", "addmm")} == {Colour.LOW}


def test_a_bias_beyond_the_range_and_one_that_is_scaled_are_not():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight, self.bias = nn.Parameter(torch.randn(16, 4) / 4), nn.Parameter(torch.full((4,), 1e-9))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x, self.weight, beta=1e9)

    amp = amprewrite.rewrite(Scaled(), dtype="fp16")
    assert error(amp(batch()), Scaled()(batch())) < 2e-3
    model = Biased(False)
    amp = amprewrite.rewrite(model, dtype="fp16")
    amp(batch())
    with torch.no_grad():
        model.up.bias[0] = 1e5
    amp.eval()
    with pytest.warns(AmpRewriteWarning, match=r"up\.bias has come to"):
        assert error(amp(batch()), model(batch())) < 2e-3


def test_a_plan_that_was_given_is_followed_whatever_the_weights_do():
    model = Net()
    plan = amprewrite.plan(model, (batch(),), dtype="fp16")
    amp = amprewrite.rewrite(model, plan=plan)
    with torch.no_grad():
        amp(batch())
        model.up.weight[0, 0] = 1e5
        amp.eval()
        amp(batch())
    assert colours(amp) == {"up": "low", "down": "low"}


def test_no_weight_is_kept_alive():
    model = Net()
    amp = amprewrite.rewrite(model, dtype="fp16")
    amp(batch())
    known = weakref.ref(model.up.weight)
    amp.up.weight = nn.Parameter(torch.zeros(16, 16))
    del model
    amp(batch())
    gc.collect()
    assert known() is None


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_a_shard_shows_that_a_weight_is_too_large_and_nothing_else():
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weights: dict[str, Tensor] = {
            name: DTensor.from_local(torch.full((4, 4), size), mesh, [Shard(0)])
            for name, size in {"grown": 1e5, "small": 1e-10, "shrunk": 1.0}.items()
        }
        found = moved([Known("grown", Fit.FITS), Known("small", Fit.FITS), Known("shrunk", Fit.TOO_LARGE)], weights, FP16)
        assert [(said.split()[2], now) for said, now in found] == [("grown", Fit.TOO_LARGE)]
    finally:
        dist.destroy_process_group()


def test_looks_get_rarer():
    schedule = Schedule()
    looks = [call for call in range(1, 5000) if schedule.look_now(training=True)]
    assert looks == [16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]
    assert schedule.look_now(training=False) and not schedule.look_now(training=False)
    schedule.due = True
    assert schedule.look_now(training=False) and not schedule.look_now(training=False)


def test_fp16_holds_weights_between_its_ends():
    sizes = {0.0: Fit.FITS, 1e-9: Fit.FLUSHED, 1e-7: Fit.FITS, 65504.0: Fit.FITS, 65536.0: Fit.TOO_LARGE, float("inf"): Fit.TOO_LARGE}
    assert {size: fit(size, FP16) for size in sizes} == sizes
