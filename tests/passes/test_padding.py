"""Padded models against unpadded ones: aligned operands, few real pads, no kernels for weights, the same numbers and states."""

from __future__ import annotations

import copy
import functools
import io
import json
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pad_help import NETS, Kernels, OddCNN, OddMLP, Operands, TinyGPT, noise, padded, pads_of, seeded
from tiers import long_beyond
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite
from amprewrite import PlanError, PolicyError
from amprewrite.runtime.model.rewritten import session_of

EPS = {"fp16": 2.0**-10, "bf16": 2.0**-7}
MOST = {**dict.fromkeys(NETS, (1, 1)), "gpt": (5, 5), "vit": (6, 7)}
"""Real pads and slices that may be left: at inputs, results, and on both sides of layer norms, which run over logical sizes."""


@pytest.fixture(autouse=True)
def sizes_seen_in_other_tests_are_forgotten() -> None:
    """Dynamo makes a size symbolic that it saw change at the same line of code, and symbolic sizes are not padded."""
    torch._dynamo.reset()


def counts(amp: Any) -> Counter[str]:
    return Counter(each.kind for each in pads_of(amp).copies)


def run(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    torch.manual_seed(1)
    return model(*inputs)


def close(a: torch.Tensor, b: torch.Tensor, dtype: str, ops: int = 16) -> bool:
    """Sums of the same numbers in another order: a few roundings apart."""
    return bool((a - b).norm() <= ops * EPS[dtype] * b.norm().clamp(min=1e-6))


# the five nets ----------------------------------------------------------------------------------------------------------


@functools.cache
def run_once(name: str) -> tuple[nn.Module, Operands]:
    """A padded net that was called twice, and the operands that its second call read."""
    amp, inputs, seen = padded(seeded(name)), NETS[name][1](), Operands()
    run(amp, inputs)
    with seen:
        run(amp, inputs)
    return amp, seen


@pytest.mark.parametrize("name", [n for n in NETS if "lstm" not in n and n != "gru"])
def test_every_operand_is_aligned(name: str) -> None:
    amp, seen = run_once(name)
    assert seen.sizes
    assert not [s for s in seen.sizes if s[1] % 8 or s[2] % 8]
    assert all(region.padded % 8 == 0 for region in pads_of(amp).regions)


@pytest.mark.parametrize("name", ["lstm", "lstm both ways", "gru"])
def test_every_gate_of_a_recurrent_layer_is_aligned(name: str) -> None:
    amp, _ = run_once(name)
    layouts = {c.value: dict(c.layout) for c in pads_of(amp).copies if "weight_" in c.value}
    gates = 3 if name == "gru" else 4
    assert len(layouts) == (8 if "both" in name else 4)
    for value, layout in layouts.items():
        assert layout[0] == ((gates, gates), (70, 72)), value
        hidden = ((2, 2), (70, 72)) if "both" in name and "ih_l1" in value else ((70, 72),)
        assert layout[1] == (((30, 32),) if "ih_l0" in value else hidden), value


@pytest.mark.parametrize("name", NETS)
def test_real_pads_and_slices_are_left_only_at_the_edges(name: str) -> None:
    amp, _ = run_once(name)
    found = counts(amp)
    pads, slices = found["pad"] + found["re-pad"], found["slice"]
    assert (pads, slices) <= MOST[name] and pads <= MOST[name][0] and slices <= MOST[name][1]
    assert found["weight"] > 0


@pytest.mark.parametrize("dtype", long_beyond(1, EPS))
@pytest.mark.parametrize("name", NETS)
def test_results_and_gradients_are_those_without_pads(name: str, dtype: str) -> None:
    plain, model = seeded(name), seeded(name)
    inputs = NETS[name][1]()
    results = []
    for each, pad in ((plain, "never"), (model, "always")):
        amp = padded(each, dtype, pad=pad, loss_scale=64.0)
        out = run(amp, inputs)
        (out.float() ** 2).mean().backward()
        results.append(out)
    assert results[0].shape == results[1].shape and close(results[1], results[0], dtype)
    for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and p.grad.shape == p.shape and p.grad.dtype == torch.float32 and p.grad.is_contiguous(), key
        assert close(p.grad, q.grad, dtype, 64) or (q.grad.norm() < 1e-6 and p.grad.norm() < 1e-4), key
    for p, q in zip(model.buffers(), plain.buffers(), strict=True):
        assert close(p.float(), q.float(), dtype)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn with batch norm", "lstm"])
@pytest.mark.long
def test_fifty_steps_are_those_without_pads(name: str, dtype: str) -> None:
    """With loss scaling built in where the format is fp16."""
    inputs = NETS[name][1]()
    curves = []
    for pad in ("never", "always"):
        amp = padded(seeded(name), dtype, pad=pad)
        optimizer = torch.optim.AdamW(amp.parameters(), lr=1e-3)
        amp.attach(optimizer)
        losses = []
        for _ in range(50):
            optimizer.zero_grad()
            loss = (run(amp, inputs) - 0.3).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(torch.tensor(losses))
    plain, with_pads = curves
    assert plain[-1] < 0.9 * plain[0]
    assert (with_pads - plain).abs().max() <= 16 * EPS[dtype] * plain.abs().max()


# weights ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", EPS)
def test_padded_weights_run_no_kernel_but_what_clears_their_memory(dtype: str) -> None:
    """A step runs as many kernels as without pads, but for the pad and the slice at the edges, and one that clears each padded copy."""
    inputs, ran = (noise(8, 101),), {}
    for pad in ("never", "always"):
        amp = padded(OddMLP(), dtype, pad=pad, loss_scale=None)
        for _ in range(2):
            run(amp, inputs).sum().backward()
        with Kernels() as kernels:
            run(amp, inputs).sum().backward()
        ran[pad] = Counter("copy" if name in ("copy_", "_to_copy") else name for name in kernels.names)
    assert not (ran["never"] - ran["always"])
    extra = ran["always"] - ran["never"]
    padded_copies = sum(bool(copy.layout) for copy in pads_of(amp).copies)
    assert extra.pop("zeros", 0) <= padded_copies
    assert set(extra) <= {"constant_pad_nd", "slice_backward"} and sum(extra.values()) <= 2


def test_a_buffer_is_lent_again_only_when_nobody_holds_it() -> None:
    """Two forwards before a backward must not share memory; after it they may."""
    model = OddMLP()
    amp = padded(model)
    first = run(amp, (noise(8, 101),))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    second = run(amp, (noise(8, 101),))
    first.sum().backward()
    plain = OddMLP()
    plain.load_state_dict({k: v / 1.5 for k, v in model.state_dict().items()})
    run(padded(plain, pad="never"), (noise(8, 101),)).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert close(p.grad, q.grad, "bf16", 64)
    second.sum().backward()


def test_memory_of_padded_weights_does_not_pile_up() -> None:
    amp = padded(OddMLP())
    cache = session_of(amp).cache
    for _ in range(5):
        run(amp, (noise(8, 101),)).sum().backward()
    after = len(cache)
    for _ in range(5):
        run(amp, (noise(8, 101),)).sum().backward()
    assert len(cache) == after <= 8


def test_inference_pads_a_weight_once() -> None:
    amp = padded(seeded("cnn with batch norm")).eval()
    with torch.no_grad():
        run(amp, (noise(4, 3, 16, 16),))
        with Kernels() as kernels:
            run(amp, (noise(4, 3, 16, 16),))
    assert Counter(kernels.names)["constant_pad_nd"] == 1  # the image's three channels
    assert Counter(kernels.names)["_to_copy"] == 2  # the image and the result


def test_tied_weights_share_one_padded_copy() -> None:
    amp = padded(TinyGPT(), overrides={"embedding": "allow"})
    amp(*NETS["gpt"][1]())
    tied = [each for each in pads_of(amp).copies if each.value == "tokens.weight"]
    assert [dict(each.layout)[0] for each in tied] == [((509, 512),)]
    assert len([c for c in pads_of(amp).copies if c.value.startswith("tokens.weight ->")]) == 0


def test_rows_that_are_looked_up_are_padded_at_their_end_alone() -> None:
    """The head's columns are seen as ten parts, and each part is padded: the rows of its table are not where they were."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(130, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.table(x))
            return F.linear(h, self.table.weight).unflatten(-1, (10, 13)).softmax(-1)

    torch.manual_seed(0)
    model, x = Tied(), torch.randint(130, (4, 6))
    amp = padded(model, "bf16", overrides={"embedding": "allow"})
    assert close(amp(x), model(x), "bf16")
    assert pads_of(amp)


def test_users_see_logical_shapes_only(tmp_path: Any) -> None:
    model = seeded("cnn with batch norm")
    shapes = {k: v.shape for k, v in model.state_dict().items()}
    amp = padded(model)
    optimizer = torch.optim.Adam(amp.parameters())
    run(amp, (noise(4, 3, 16, 16),)).sum().backward()
    optimizer.step()
    assert {k: v.shape for k, v in amp.state_dict().items()} == shapes
    assert all(p.grad is None or p.grad.shape == p.shape for p in amp.parameters())
    assert all(s.shape == p.shape for p in amp.parameters() for k, s in optimizer.state[p].items() if k != "step")
    torch.save(amp.state_dict(), tmp_path / "padded.pt")
    plain = seeded("cnn with batch norm", 1)
    plain.load_state_dict(torch.load(tmp_path / "padded.pt"))
    back = padded(seeded("cnn with batch norm", 2))
    back.load_state_dict(plain.state_dict())
    assert close(run(back.eval(), (noise(4, 3, 16, 16),)), run(padded(plain, pad="never").eval(), (noise(4, 3, 16, 16),)), "bf16")


def test_copies_and_pickles_of_a_padded_model_pad_too() -> None:
    amp = padded(OddMLP())
    out = run(amp, (noise(8, 101),))
    for twin in (copy.deepcopy(amp), pickle.loads(pickle.dumps(amp))):
        assert torch.equal(run(twin, (noise(8, 101),)), out) and pads_of(twin)


def test_second_derivatives() -> None:
    grads = []
    for pad in ("never", "always"):
        torch.manual_seed(0)
        amp = padded(OddMLP(), "fp16", pad=pad, loss_scale=8.0)
        x = noise(8, 101).requires_grad_()
        (slope,) = torch.autograd.grad(run(amp, (x,)).sum(), x, create_graph=True)
        slope.square().sum().backward()
        grads.append([p.grad for p in amp.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1]) > 3
    assert all(close(b, a, "fp16", 64) for a, b in zip(*grads, strict=True))


BETWEEN: dict[str, Callable[[nn.BatchNorm1d, Tensor], Tensor]] = {
    "batch norm": lambda norm, h: norm(h),
    "batch norm, averages": lambda norm, h: F.batch_norm(h, torch.zeros(5), torch.ones(5), norm.weight, norm.bias),
    "layer norm": lambda norm, h: F.layer_norm(h, (5,)),
    "rms norm": lambda norm, h: F.rms_norm(h, (5,)),
    "normalize": lambda norm, h: F.normalize(h, dim=0),
    "by its length": lambda norm, h: h / h.square().sum(-1, keepdim=True).add(1e-4).sqrt(),
    "standardised": lambda norm, h: (h - h.mean(0)) / (h.var(0) + 1e-5).sqrt(),
    "softmax of a batch": lambda norm, h: h.softmax(0),
    "power": lambda norm, h: h.relu().pow(1.5),
    "root": lambda norm, h: (h.abs() + 1e-4).sqrt(),
    "softplus": lambda norm, h: F.softplus(h),
    "mish": lambda norm, h: F.mish(h),
    "elu": lambda norm, h: F.elu(h),
}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("between", BETWEEN)
def test_a_penalty_on_gradients_is_as_exact_behind_padding(between: str, dtype: str) -> None:
    """Padding has a variance of 0: there a batch norm's second derivative is 3e7, which fp16 does not hold."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.last(BETWEEN[between](self.norm, self.first(x))))

    def gradients(model: nn.Module) -> list[Tensor]:
        x = noise(3, 5).requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.square().mean() + slope.square().sum()).backward()
        return [x.grad, *(each.weight.grad for each in (model.first, model.last))]

    torch.manual_seed(1)
    model = Critic()
    exact = gradients(copy.deepcopy(model))
    plain, wide = (gradients(amprewrite.rewrite(copy.deepcopy(model), dtype=dtype, pad=pad)) for pad in ("never", "always"))
    for want, beside, got in zip(exact, plain, wide, strict=True):
        assert float((got - want).norm()) <= 2 * float((beside - want).norm()) + 1e-2 * float(want.norm()) + 1e-6


@pytest.mark.parametrize(("dtype", "eps", "through"), [("fp16", 1e-5, False), ("fp16", 1e-2, True), ("bf16", 1e-5, True)])
def test_a_batch_norm_in_training_is_padded_if_its_second_derivative_there_is_finite(dtype: str, eps: float, through: bool) -> None:
    net = nn.Sequential(nn.Linear(101, 101), nn.BatchNorm1d(101, eps=eps), nn.Linear(101, 101))
    amp = padded(net, dtype)
    run(amp, (noise(8, 101),))
    assert ("batch_norm" in {each.value for each in pads_of(amp).values}) == through


@pytest.mark.parametrize("follow", [lambda t, h: t.type_as(h), lambda t, h: t.to(h)], ids=["type_as", "to"])
@pytest.mark.parametrize("positions", [lambda x: torch.arange(5), lambda x: torch.arange(5).float(), lambda x: x[0] > 0])
def test_what_takes_the_dtype_of_a_padded_value_needs_no_slice_of_it(positions: Any, follow: Any) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            return self.last(h) * (follow(positions(x), h) * 1.01).cos()

    model = Turned()
    amp = padded(copy.deepcopy(model))
    assert close(run(amp, (noise(3, 5),)), model(noise(3, 5)), "bf16")


@pytest.mark.parametrize("grad", [True, False])
def test_a_compiler_gets_pads_it_can_trace(grad: bool) -> None:
    amp, plain = (padded(seeded("gpt"), backend="aot_eager", pad=pad) for pad in ("always", "never"))
    with torch.set_grad_enabled(grad):
        a, b = (each(*NETS["gpt"][1]()) for each in (amp, plain))
    assert pads_of(amp) and close(a, b, "bf16")


# asking -----------------------------------------------------------------------------------------------------------------------


def test_auto_declines_on_the_cpu_and_says_so() -> None:
    amp = amprewrite.rewrite(OddMLP(), dtype="bf16", device="cpu-bf16", example_inputs=(noise(8, 101),))
    plan = amp.plan
    assert not pads_of(amp) and all(region.declined for region in pads_of(amp).regions)
    assert "unaligned sizes stay: cpu with native bf16 gains nothing" in plan.summary() and "pad 101 stays: cpu" in str(plan)
    assert "gains nothing from aligned" in plan.explain("linear")


@pytest.mark.parametrize("never", ["never", None, False])
def test_never_considers_nothing(never: Any) -> None:
    amp = amprewrite.rewrite(OddMLP(), dtype="bf16", pad=never, example_inputs=(noise(8, 101),))
    assert pads_of(amp) == amprewrite.plan(OddMLP(), (noise(8, 101),), dtype="bf16", pad="never").regions[0].pads
    assert not pads_of(amp).regions


def test_modules_may_be_asked_for_one_by_one() -> None:
    amp = amprewrite.rewrite(OddMLP(), dtype="bf16", pad={"module:net.2": "always"}, example_inputs=(noise(8, 101),))
    (done,) = [c for c in pads_of(amp).copies if c.kind == "weight" and c.value.endswith("weight") and len(c.layout) == 2]
    assert done.value == "net.2.weight"


def test_a_multiple_of_ones_own() -> None:
    amp = padded(OddMLP(), pad=64)
    run(amp, (noise(8, 101),))
    assert {region.padded for region in pads_of(amp).regions} == {128, 64}


@pytest.mark.parametrize(
    "pad, says",
    [
        pytest.param("perhaps", "'perhaps' is not understood; use 'auto', 'always'", id="another word"),
        pytest.param(0, "a multiple lies between 1 and", id="a multiple of zero"),
        pytest.param(-8, "a multiple lies between 1 and", id="a negative multiple"),
        pytest.param(10**6, "a multiple lies between 1 and", id="a huge multiple"),
        pytest.param(True, "pad = True is not understood", id="a bool"),
        pytest.param(8.0, "pad = 8.0 is not understood", id="a float"),
        pytest.param({"module:nett": "always"}, r"matches no module of the model; did you mean module:net", id="a pattern without a match"),
        pytest.param({"net": "always"}, "keys are 'module:PATTERN'", id="a key without a scope"),
        pytest.param({"module:": "always"}, "keys are 'module:PATTERN'", id="an empty pattern"),
        pytest.param({3: "always"}, "keys are 'module:PATTERN'", id="a key that is no text"),
        pytest.param({"module:net": 0}, r"pad\['module:net'\] = 0: a multiple lies", id="a multiple of zero for a module"),
    ],
)
def test_what_makes_no_sense_is_refused(pad: Any, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        amprewrite.rewrite(OddMLP(), dtype="bf16", pad=pad)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to measure on")
def test_measuring_needs_a_gpu() -> None:
    with pytest.raises(PolicyError, match="times kernels on a CUDA device, and there is none"):
        amprewrite.rewrite(OddMLP(), dtype="bf16", pad="measure")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to time kernels on")
def test_measured_gains_are_in_the_plan() -> None:
    amp = padded(OddMLP(4095).cuda(), pad="measure")
    amp(torch.randn(4096, 4095, device="cuda"))
    assert any(region.measured or region.why for region in pads_of(amp).regions)


# plans --------------------------------------------------------------------------------------------------------------------------


def test_a_plan_with_pads_survives_json_and_is_followed() -> None:
    model = seeded("gpt")
    plan = amprewrite.plan(model, NETS["gpt"][1](), dtype="bf16", pad="always")
    again = amprewrite.CastPlan.from_json(plan.to_json())
    assert again == plan and again.regions[0].pads
    amp = amprewrite.rewrite(model, plan=again, example_inputs=NETS["gpt"][1]())
    assert pads_of(amp) == plan.regions[0].pads


def test_a_plan_that_pads_what_is_not_there_is_refused() -> None:
    data = json.loads(amprewrite.plan(OddMLP(), (noise(8, 101),), dtype="bf16", pad="always").to_json())
    data["regions"][0]["pads"]["copies"][0]["value"] = "nobody"
    plan = amprewrite.CastPlan.from_json(json.dumps(data))
    with pytest.raises(PlanError, match="the plan pads nobody, which the graph does not have"):
        amprewrite.rewrite(OddMLP(), plan=plan, example_inputs=(noise(8, 101),))


def test_the_plan_names_sizes_pads_and_bytes() -> None:
    amp = padded(OddMLP(), example_inputs=(noise(8, 101),))
    text = str(amp.plan)
    assert "pad 101 -> 104 in" in text and "weights in their casts" in text and "bytes added" in text
    assert "1 pads and 1 slices" in amp.plan.summary()
    assert "its result is padded: dim 1: 101 -> 104" in amp.plan.explain("linear")
    assert "pad: x -> bf16 dim 1: 101 -> 104 for linear" in amp.plan.explain("linear")


# exports -----------------------------------------------------------------------------------------------------------------------


def test_exports_know_logical_shapes_only() -> None:
    amp = padded(OddMLP())
    program = amp.export_program((noise(8, 101),))
    shapes = [n.meta["val"].shape for n in program.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert not any(104 in shape for shape in shapes)
    assert torch.isfinite(program.module()(noise(8, 101))).all()


# hazards in whole graphs --------------------------------------------------------------------------------------------------------


class Lines(nn.Module):
    """A function between two odd linear layers."""

    def __init__(self, between: Any, width: int = 30, after: int = 30) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(12, width), nn.Linear(after, 5), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))


def with_and_without(between: Any, dtype: str = "fp16", after: int = 30, shape: tuple[int, ...] = (4, 6, 12)) -> Any:
    """The padded model, after its result and gradients were compared with those of the unpadded one."""
    found = []
    for pad in ("never", "always"):
        torch.manual_seed(0)
        amp = padded(Lines(between, after=after), dtype, pad=pad, loss_scale=None)
        x = noise(*shape).requires_grad_()
        out = run(amp, (x,))
        out.float().square().sum().backward()
        found.append((amp, out, x.grad, [p.grad for p in amp.parameters()]))
    (_, a, slope_a, grads_a), (amp, b, slope_b, grads_b) = found
    assert torch.isfinite(b).all() and close(b, a, dtype)
    assert close(slope_b, slope_a, dtype, 64)
    assert all(close(q, p, dtype, 64) for p, q in zip(grads_a, grads_b, strict=True))
    assert pads_of(amp)
    return amp


PASSES = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "sigmoid puts a half into the padding": torch.sigmoid,
    "sigmoid, product, sum": lambda x: torch.sigmoid(x) * x + x,
    "cosine": torch.cos,
    "a number is added": lambda x: (x + 1.5) * 0.25,
    "a number is divided": lambda x: x / 3,
    "a power": lambda x: x.pow(2),
    "clamped": lambda x: x.clamp(-0.5, 0.5),
    "in place at the end of its life": lambda x: torch.relu_(x + 1),
    "transposed twice": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "merged rows": lambda x: x.reshape(-1, 30).reshape(4, 6, 30),
    "a new dim": lambda x: x.unsqueeze(0).squeeze(0),
    "picked rows": lambda x: x[1:, 2] * 2,
    "stacked": lambda x: torch.stack((x, -x)),
    "joined rows": lambda x: torch.cat((x, 2 * x), 1),
    "masked with one row for all columns": lambda x: torch.where(x.sum(-1, keepdim=True) > 0, x, 0.0),
    "scaled by one row for all columns": lambda x: x * x.mean(-1, keepdim=True),
    "a mean over rows": lambda x: x.mean(1),
}
STOPS = {
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: F.log_softmax(x, -1),
    "layer norm": lambda x: F.layer_norm(x, (30,)),
    "a mean over the padded dim": lambda x: x * 2 + x.mean(-1, keepdim=True),
    "a sum over the padded dim": lambda x: x - x.sum(-1, keepdim=True),
    "a norm": lambda x: F.normalize(x, dim=-1),
    "the largest": lambda x: x - x.amax(-1, keepdim=True),
    "sorted": lambda x: x.sort(-1).values,
    "a running sum": lambda x: x.cumsum(-1),
    "flipped": lambda x: x.flip(-1),
    "rolled": lambda x: x.roll(3, -1),
    "the logarithm of padding": lambda x: torch.log(x.abs() + 1) + torch.log(torch.relu(x) + 0.1),
    "the root of padding": lambda x: x.abs().add(0.01).sqrt(),
    "one over the padding": lambda x: 1 / (x.square() + 0.5),
    "padding over padding": lambda x: x / (x.abs() + 1),
    "a row added to all columns": lambda x: x + x[..., :1],
    "the last column": lambda x: x * x[..., -1:],
    "written in place while others read": lambda x: (x.clone().add_(1), x)[1] + torch.zeros_like(x).add_(x),
    "read, and transposed in place then": lambda x: (x, F.pad(x, (1, 1), "circular"), x.transpose_(0, 1))[1][..., 1:-1] + 0,
    "read, and of one dim more in place then": lambda x: (x, F.pad(x, (1, 1), "circular"), x.unsqueeze_(0))[1][..., 1:-1] + 0,
    "a view of a view": lambda x: x.view(4, 6, 5, 6).transpose(-1, -2).reshape(4, 6, 30),
    "an overlapping view": lambda x: x.contiguous().as_strided((4, 6, 30), (180, 30, 1)),
    "an unfold": lambda x: x.unfold(-1, 30, 1).squeeze(-2),
    "an index of tensors": lambda x: x[..., torch.arange(29, -1, -1)],
    "a mask": lambda x: x.masked_fill(torch.arange(30) > 20, -1.0),
}


@pytest.mark.parametrize("dtype", long_beyond(1, EPS))
@pytest.mark.parametrize("name", [*PASSES, *STOPS])
def test_between_two_layers_nothing_changes(name: str, dtype: str) -> None:
    with_and_without({**PASSES, **STOPS}[name], dtype)


@pytest.mark.parametrize("name", [n for n in PASSES if "mean over" not in n])
def test_what_passes_padding_needs_no_pad_after_it(name: str) -> None:
    """One real pad, at the input; what is sliced, is sliced for a result or a sum."""
    amp = with_and_without(PASSES[name])
    assert counts(amp)["pad"] + counts(amp)["re-pad"] == 1


@pytest.mark.parametrize("name", ["softmax", "layer norm", "sorted", "flipped", "an index of tensors", "a mask"])
def test_what_needs_the_logical_size_gets_it(name: str) -> None:
    amp = with_and_without(STOPS[name])
    assert counts(amp)["slice"] >= 2 and counts(amp)["pad"] + counts(amp)["re-pad"] >= 2


def test_halves_of_a_gate_are_padded_one_by_one() -> None:
    amp = with_and_without(lambda x: (lambda a, b: a * torch.sigmoid(b))(*x.chunk(2, -1)), after=15)
    assert {c.layout for c in pads_of(amp).copies if c.value == "first.bias"} == {((0, ((2, 2), (15, 16))),)}


def test_a_tensor_that_a_product_fills_keeps_its_size() -> None:
    """PyTorch warns if a product must change the size of the tensor that it fills."""

    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(noise(16, 13)), nn.Parameter(noise(13, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = torch.empty(len(x), 13)
            torch.mm(x, self.first, out=made)
            return (made.relu() @ self.second).relu() @ self.second.mT

    model, x = Filled(), noise(8, 16)
    amp = padded(model, "bf16")
    with torch.no_grad():
        assert close(amp(x), model(x), "bf16")
    assert pads_of(amp) and "mm" not in {each.value for each in pads_of(amp).values}


def test_fewer_chunks_than_asked_for_have_logical_size() -> None:
    """Six chunks of five come of thirty in seven, and seven of 48 in seven. No op refuses that, so the second layer is padded."""
    amp = with_and_without(lambda x: torch.cat([torch.tanh(part) for part in x.chunk(7, -1)], -1))
    assert any(each.value == "second.weight" for each in pads_of(amp).copies)


@pytest.mark.parametrize("weights", [True, False])
def test_statistics_of_joined_channels_are_those_without_pads(weights: bool) -> None:
    """Each part is padded by itself, so padding lies between the channels, not behind them. Without statistics, weights are made."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.last = nn.Conv1d(16, 13, 1), nn.Conv1d(16, 13, 1), nn.Conv1d(26, 16, 1)
            self.norm = nn.BatchNorm1d(26, affine=weights, track_running_stats=weights)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(torch.cat((self.one(x), self.other(x)), 1)).relu())

    torch.manual_seed(0)
    model, x = Joined(), noise(8, 16, 32)
    amp = padded(copy.deepcopy(model), "bf16")
    assert close(amp(x), model(x), "bf16")
    assert all(close(got.float(), want.float(), "bf16") for got, want in zip(amp.buffers(), model.buffers(), strict=True))
    assert any(each.value == "batch_norm" for each in pads_of(amp).values)


def test_joined_columns_are_segments() -> None:
    amp = with_and_without(lambda x: torch.cat((x, torch.tanh(x)), -1), after=60)
    assert {dict(c.layout)[1] for c in pads_of(amp).copies if c.value == "second.weight"} == {((2, 2), (30, 32))}


def test_columns_of_different_origin_are_joined_in_logical_size() -> None:
    amp = with_and_without(lambda x: torch.cat((x, x[..., :7]), -1), after=37)
    assert counts(amp)["slice"] >= 1


def test_rotated_halves() -> None:
    with_and_without(lambda x: x * 0.5 + torch.cat((-x[..., 15:], x[..., :15]), -1))


def test_heads_are_padded_each() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        q = x.view(4, 6, 2, 15).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q * 0.5, q + 0).transpose(1, 2).reshape(4, 6, 30)

    amp = with_and_without(attend)
    assert {dict(c.layout)[0] for c in pads_of(amp).copies if c.value == "first.weight"} == {((2, 2), (15, 16))}


def test_two_products_of_activations() -> None:
    """Attention by hand: its own scale, a softmax over tokens between."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        q = x.view(4, 6, 2, 15).transpose(1, 2)
        scores = (q @ q.transpose(-1, -2)) / 15**0.5
        return (scores.softmax(-1) @ q).transpose(1, 2).reshape(4, 6, 30)

    with_and_without(attend)


def test_a_value_and_its_view_are_padded_each_where_both_are_read() -> None:
    """Both are cast for one product, and the view's cast reads the value: it is not the value's."""

    class Gram(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            product = x @ x.mT
            x.t().add_(1)
            return product

    given, same = torch.ones(2, 2), torch.ones(2, 2)
    with torch.no_grad():
        assert torch.equal(amprewrite.rewrite(Gram(), dtype="bf16", pad="always")(given), Gram()(same))
    assert torch.equal(given, same)


class Still(nn.Module):
    """Reads a value under no_grad first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            still = self.linear(x)
        return still + self.linear(x)


def test_no_pad_is_shared_with_code_that_runs_without_gradients() -> None:
    """A pad that is made under no_grad would lose the gradients of those who read it later."""
    model = Still()
    amp = amprewrite.rewrite(model, dtype="bf16", pad="always")
    ours, theirs = noise(3, 5).requires_grad_(), noise(3, 5).requires_grad_()
    amp(ours).sum().backward()
    model(theirs).sum().backward()
    assert pads_of(amp).copies
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-2, atol=2e-2)


def test_a_weight_that_one_op_reads_padded_and_another_as_it_is_has_two_copies() -> None:
    class Twice(Still):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            product = torch.tensordot(x, self.linear.weight, 1)
            with torch.no_grad():
                still = self.linear(product)
            return still + product

    model, amp = Twice(), amprewrite.rewrite(Twice(), dtype="bf16", pad="always")
    for each in (model, amp):
        each(noise(3, 5)).sum().backward()
    assert pads_of(amp).copies
    torch.testing.assert_close(amp.linear.weight.grad, model.linear.weight.grad, rtol=2e-2, atol=5e-2)


def test_no_pad_is_shared_across_a_write() -> None:
    class Written(Still):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1.0
            before = self.linear(x)
            x.add_(1)
            return before - self.linear(x)

    model = Written()
    amp = amprewrite.rewrite(model, dtype="bf16", pad="always")
    with torch.no_grad():
        got, want = amp(noise(3, 5)), model(noise(3, 5))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_half_in_the_padding_is_no_good_for_a_product_of_activations() -> None:
    """Both sides hold one half there: 2 · ¼ too much in every score if nobody looked."""
    amp = with_and_without(lambda x: torch.sigmoid(x) @ torch.sigmoid(x).transpose(-1, -2) @ x)
    assert pads_of(amp)


def test_values_returned_between_are_sliced() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 30), nn.Linear(30, 5)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.relu(self.first(x))
            return self.second(h), h

    amp = padded(Both())
    out, hidden = amp(noise(4, 12))
    assert hidden.shape == (4, 30) and hidden.is_contiguous() and out.shape == (4, 5)


class SeenByOthers(nn.Module):
    """Hands a value between two padded layers to its caller or to autograd, besides reading it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(12, 30), nn.Linear(30, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.first(x)
        y = self.second(torch.tanh(h))
        if self.how == "returned":
            return h, y
        if self.how == "with a view":
            return h, h.view(-1), y
        return (torch.autograd.grad(y.sum(), h, create_graph=True)[0],)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("how", ["returned", "with a view", "differentiated"])
def test_what_others_see_stands_on_the_path_of_its_padded_readers(how: str, captured: bool) -> None:
    torch.manual_seed(0)
    model, x = SeenByOthers(how), noise(4, 12)
    gradients = []
    with torch._dynamo.config.patch(trace_autograd_ops=captured):
        for net in (model, padded(copy.deepcopy(model), dtype="bf16")):
            results = net(x)
            for each in results:
                each.retain_grad()
            results[-1].square().sum().backward()
            gradients.append([results[-1].detach(), *(each.grad for each in results), *(p.grad for p in net.parameters())])
    assert any(region.pads for region in net.plan.regions)
    for want, got in zip(*gradients, strict=True):
        assert (want is None) == (got is None)
        assert want is None or close(got, want, "bf16")


def test_sizes_of_one_and_none_are_left_alone() -> None:
    amp = padded(nn.Sequential(nn.Linear(7, 1), nn.Linear(1, 7)))
    run(amp, (noise(0, 7),))
    assert {region.size for region in pads_of(amp).regions} == {7}


def test_symbolic_sizes_are_left_alone() -> None:
    class Pairwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(12, 30)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.line(x)
            return h @ h.transpose(-1, -2)

    plain, amp = (padded(m, pad=pad) for m, pad in ((Pairwise(), "never"), (Pairwise(), "always")))
    plain.load_state_dict(amp.state_dict())
    for rows in (5, 6, 7, 9):
        assert close(amp(noise(2, rows, 12)), plain(noise(2, rows, 12)), "bf16")
    assert any("symbolic" in region.why for plan in amp.plans for r in plan.regions for region in r.pads.regions)


def test_grouped_convolutions_stay_and_say_why() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 30, 3), nn.Conv2d(30, 45, 3, groups=15)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.relu(self.a(x)))

    model = Grouped()
    a, b = padded(model)(noise(2, 3, 9, 9)), padded(model, pad="never")(noise(2, 3, 9, 9))
    assert close(a, b, "bf16")
    amp = padded(model, example_inputs=(noise(2, 3, 9, 9),))
    assert any("grouped convolution" in region.why for region in pads_of(amp).regions)


def test_depthwise_convolutions_follow_their_channels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 30, 3), nn.Conv2d(30, 30, 3, groups=30), nn.ReLU(), nn.Conv2d(30, 5, 1))
    amp, plain = padded(model), padded(model, pad="never")
    x = noise(2, 3, 9, 9)
    assert close(amp(x), plain(x), "bf16")
    assert counts(amp)["pad"] == 1 and counts(amp)["slice"] == 1


def test_transposed_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 30, 3), nn.ConvTranspose2d(30, 21, 2, 2), nn.ReLU(), nn.ConvTranspose2d(21, 3, 2, 2))
    x = noise(2, 3, 9, 9)
    assert close(padded(model)(x), padded(model, pad="never")(x), "bf16")


def test_channels_last_stays() -> None:
    model = OddCNN().to(memory_format=torch.channels_last)
    x = noise(4, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    assert close(padded(model)(x), padded(model, pad="never")(x), "bf16")


def test_saved_and_loaded_in_the_middle_of_training() -> None:
    model = OddMLP()
    amp = padded(model)
    run(amp, (noise(8, 101),)).sum().backward()
    kept = io.BytesIO()
    torch.save(amp.state_dict(), kept)
    kept.seek(0)
    amp.load_state_dict(torch.load(kept))
    assert run(amp, (noise(8, 101),)).shape == (8, 10)


# results that depend on what the padding holds ------------------------------------------------------------------------------


class Normed(nn.Module):
    """A batch norm between two products, called as PyTorch itself does: the operands of `torch.batch_norm` stand in another order."""

    def __init__(self, eps: float = 1e-5, computed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(61, 61, bias=False), nn.Linear(61, 61)
        self.w, self.b, self.eps, self.computed = nn.Parameter(torch.rand(61) + 0.5), nn.Parameter(torch.randn(61)), eps, computed
        self.register_buffer("mean", torch.zeros(61))
        self.register_buffer("var", torch.ones(61))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, b = (self.w.exp(), self.b.sigmoid()) if self.computed else (self.w, self.b)
        h = torch.batch_norm(self.first(x), w, b, self.mean, self.var, self.training, 0.1, self.eps, True)
        return h @ h.t() if self.computed else self.last(h)


class Two(nn.Module):
    """The product of what a body makes of the results of two products."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.body = nn.Linear(61, 61), nn.Linear(61, 61), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.q(x), self) @ self.body(self.k(x), self).t()


ODD = {
    "torch.batch_norm in training": lambda: Normed(),
    "torch.batch_norm in eval": lambda: Normed().eval(),
    "computed weights of a batch norm": lambda: Normed(computed=True),
    "a batch norm without eps": lambda: Normed(eps=0.0).eval(),
    "moved to the right": lambda: Two(lambda h, net: F.pad(h, (1, -1))),
    "moved to the left": lambda: Two(lambda h, net: net.k(F.pad(torch.sigmoid(h), (-1, 1)))),
    "constant_pad_nd of ones": lambda: Two(lambda h, net: torch.constant_pad_nd(h, (0, 0, 1, 0), 1.0)),
    "rounded to one digit": lambda: Two(lambda h, net: torch.round(torch.sigmoid(h), decimals=1)),
    "saturated after a division by zero": lambda: Two(lambda h, net: torch.tanh(h.abs() / (torch.arange(len(h)) % 4)[:, None])),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_padding_holds_is_known_for_odd_calls(name: str, dtype: str) -> None:
    model, x = ODD[name](), torch.randn(64, 61, generator=torch.Generator().manual_seed(3))
    plain, amp = copy.deepcopy(model), amprewrite.rewrite(copy.deepcopy(model), dtype=dtype, pad="always")
    want, got = plain(x), amp(x)
    assert got.isfinite().equal(want.isfinite())
    assert (got - want).norm() <= {"bf16": 3e-2, "fp16": 5e-3}[dtype] * want.norm()
    for one in (got, want):
        one.square().mean().backward()
    for (_, p), (_, q) in zip(amp.named_parameters(), plain.named_parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None)
        assert torch.equal(p, q), "no forward writes to a parameter"
    for p, q in zip(amp.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_batch_norm_reads_what_was_padded_without_gaps(low: torch.dtype) -> None:
    """PyTorch's CPU kernel rounds the mean gradient of a strided low operand, so that the gradients no longer add up to 0, as they do."""
    torch.manual_seed(0)
    plain, x, weights = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(4097, 4), torch.randn(4097, 4)
    amp = amprewrite.rewrite(copy.deepcopy(plain), dtype=low, pad="always", memory=1e6, loss_scale=None)
    with torch.autocast("cpu", low):
        (plain(x) * weights).sum().backward()
    (amp(x) * weights).sum().backward()
    assert pads_of(amp).copies
    assert amp[0].bias.grad.norm() <= 1.5 * plain[0].bias.grad.norm()
