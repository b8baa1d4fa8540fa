"""The strict interpreter against roundings computed by hand, against the real kernels, and on models with several regions."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from tiers import long_beyond
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.accuracy.strict.interpreter import round_to
from amprewrite.accuracy.verify import Report, verify
from amprewrite.runtime.compiler.capture_check import relative_error
from amprewrite.tables.formats import BF16, FP16, FP32
from amprewrite.tables.vocabulary import Colour


def rounded(tensor: torch.Tensor, eps: float) -> torch.Tensor:
    """Round to nearest even by hand: scale every value's last kept bit to one, round, scale back."""
    _, exponent = torch.frexp(tensor.double())
    step = eps * torch.exp2(exponent.double() - 1)
    return (torch.round(tensor.double() / step) * step).float()


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16, bias=False)
        self.second = nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@torch.no_grad()
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
def test_a_chain_is_rounded_as_by_hand(fmt):
    model, x = Chain(), torch.randn(5, 8)
    report = verify(amprewrite.rewrite(model, dtype=fmt.dtype), (x,))

    def low(t: torch.Tensor) -> torch.Tensor:
        return rounded(t, fmt.eps)

    first = F.linear(low(x), low(model.first.weight))
    second = F.linear(torch.relu(low(first)), low(model.second.weight))
    rows = {row.name: row for row in report.rows}
    assert rows[f"x -> {fmt.name}"].introduced == pytest.approx(relative_error([low(x)], [x]))
    assert rows["linear"].introduced == pytest.approx(relative_error([low(first)], [first]))
    assert rows["linear"].accumulated == pytest.approx(relative_error([low(first)], [model.first(x)]))
    assert rows["relu"].introduced == 0
    assert rows["linear_1"].introduced == pytest.approx(relative_error([low(second)], [second]))
    assert report.output_error == pytest.approx(relative_error([low(second)], [model(x)]))


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
def test_rounding_is_to_nearest_even(fmt):
    ties = torch.tensor([1 + fmt.eps / 2, 1 + 3 * fmt.eps / 2, -1 - fmt.eps / 2])
    assert round_to(ties, fmt).tolist() == [1.0, 1 + 2 * fmt.eps, -1.0]
    assert round_to(torch.tensor([fmt.max]), fmt).item() == fmt.max
    values = torch.randn(1000) * 3
    assert torch.equal(round_to(values, fmt), rounded(values, fmt.eps))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.head(F.relu(self.norm(self.conv(x)), inplace=True)), -1)


@torch.no_grad()
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_agrees_with_really_running_in_bf16(train):
    model, x = Net().train(train), torch.randn(4, 3, 8, 8)
    amp = amprewrite.rewrite(model, dtype="bf16")
    report = verify(amp, (x,))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    exact = model(x)
    model.load_state_dict(state)
    real = relative_error([amp(x)], [exact])
    # Both round at the same places; only the order of fp32 sums inside the kernels differs.
    assert 0.5 * real <= report.output_error <= 2 * real
    assert {row.name for row in report.rows if row.op != "cast"} == {
        n.name for n in amp.plan.nodes if n.role == "op" and n.colour is not Colour.PLAIN
    }


@torch.no_grad()
def test_leaves_model_inputs_and_random_state_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    amp, x = amprewrite.rewrite(model, dtype="bf16"), torch.randn(6, 4)
    before, state, given = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state(), x.clone()
    report = verify(amp, (x,))
    assert report.output_error < 0.05, "both runs must draw the same dropout mask"
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(x, given)
    with pytest.raises(amprewrite.PlanError):
        print(amp.plan)  # verifying is no call of the model


def test_leaves_no_hook_of_the_model_on_weights_and_inputs() -> None:
    class Hooks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for each in (self.linear.weight.contiguous(), x.contiguous()):
                each.register_hook(lambda gradient: gradient * 2)
            return self.linear(x)

    amp, x = amprewrite.rewrite(Hooks(), dtype="bf16"), torch.randn(2, 4, requires_grad=True)
    verify(amp, (x,))
    assert not amp.linear.weight._backward_hooks and not x._backward_hooks


class Hot(nn.Module):
    """Sums of squares that leave fp16's range, then come back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, 4, bias=False)
        nn.init.constant_(self.up.weight, 40.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("dtype", long_beyond(1, ["bf16", "fp16"]))
def test_a_result_whose_shape_rounding_changes_is_told(dtype):
    class Selects(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1024, 64)

        def forward(self, x):
            y = self.linear(x)
            return y[y[:, 0] > 0]

    torch.manual_seed(0)
    report = verify(amprewrite.rewrite(Selects().eval(), dtype=dtype), (torch.randn(20_000, 1024),))
    assert math.isinf(report.output_error)
    assert "rounding changes the shapes of results, which depend on values, so their error is infinite: (" in str(report)


@torch.no_grad()
def test_an_fp16_overflow_is_found_and_named():
    x = torch.full((2, 64), 50.0)
    report = verify(amprewrite.rewrite(Hot(), dtype="fp16"), (x,))
    first = report.overflows[0]
    assert (first.name, first.module, first.overflow) == ("linear", "up", 1.0)
    assert first.largest == pytest.approx(64 * 40 * 50)
    assert report.worst(1) == (first,)
    assert math.isinf(report.output_error)
    assert "overflow: linear is the first" in str(report)
    assert not verify(amprewrite.rewrite(Hot(), dtype="bf16"), (x,)).overflows


@torch.no_grad()
def test_an_fp16_underflow_is_found():
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, 1e-9)
    amp = amprewrite.rewrite(model, dtype="fp16", overrides={"node:linear": "low"})
    rows = verify(amp, (torch.ones(1, 4),)).rows
    assert next(row for row in rows if row.weight).underflow == 1.0


@torch.no_grad()
def test_finite_minimum_masks_are_no_overflow():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.q(x) @ self.k(x).transpose(1, 2)
            mask = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
            return torch.softmax(scores + mask, -1)

    report = verify(amprewrite.rewrite(Masked(), dtype="fp16"), (torch.randn(2, 4, 8),))
    assert not report.overflows and report.output_error < 2e-2


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        torch._dynamo.graph_break()
        return self.b(h) + x


@torch.no_grad()
def test_errors_run_on_through_the_regions_of_a_model():
    model, x = Broken(), torch.randn(3, 8)
    report = verify(amprewrite.rewrite(model, dtype="bf16"), (x,))
    rows = {row.name: row for row in report.rows}
    low = [row for name, row in rows.items() if name.startswith("graph1/") and row.op == "linear"]
    assert len(low) == 1 and low[0].accumulated > rows["graph0/linear"].introduced
    h = round_to(F.linear(round_to(x, BF16), round_to(model.a.weight, BF16), round_to(model.a.bias, BF16)), BF16)
    assert rows["graph0/linear"].accumulated == pytest.approx(relative_error([h], [model.a(x)]), rel=1e-3)


def test_checkpoint_bodies_are_followed():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    amp = amprewrite.rewrite(Checkpointed(), dtype="bf16")
    x = torch.randn(4, 8, requires_grad=True)
    report = verify(amp, (x,))
    inner = [row for row in report.rows if row.op == "linear"]
    assert len(inner) == 2 and all(row.colour is Colour.LOW and 0 < row.introduced < BF16.eps for row in inner)
    assert 0 < report.output_error < 0.02


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        energy = self.b(torch.tanh(self.a(x))).sum()
        return energy, -torch.autograd.grad(energy, x, create_graph=True)[0]


def test_a_model_that_takes_gradients_has_no_graphs_of_ours() -> None:
    amp, x = amprewrite.rewrite(Forces(), dtype="bf16"), torch.randn(8, 16)
    report, found = verify(amp, (x,)), amprewrite.debug(amp, (x,))
    assert not report.notes and not found.notes
    assert {row.op for row in report.rows} == {"cast", "detach", "linear", "tanh", "sum", "neg"}
    assert len(found.plan.regions) == 3


@pytest.mark.parametrize("count", [1, 2])
def test_nodes_in_bodies_of_checkpoints_are_named_as_in_the_plan(count: int) -> None:
    class Inner(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.linear = inner, nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            return self.linear(x)

    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (Inner(Inner(nn.Sequential(nn.Linear(8, 8), nn.GELU()))) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            if count == 1:
                return x
            torch._dynamo.graph_break()
            return self.second(x)

    model, x = Graphs().train(), torch.randn(4, 8)
    amp = amprewrite.rewrite(model, dtype="bf16", example_inputs=(x,))
    known = {node.name for node in amp.plan.nodes}
    assert len(amp.plan.regions) == 3 * count
    report, found = verify(amp, (x,)), amprewrite.debug(amp, (x,))
    names = [name for row in (*report.rows, *found.rows, *found.gradient_rows) for name in (row.name, *row.inputs)]
    assert {name.partition(" -> ")[0] for name in names} <= known
    causes = {cause.name for cause in amprewrite.sensitivity(model, [x]).causes}
    assert causes <= known and {name.partition("/")[0] for name in causes} == {region.name for region in amp.plan.regions}


@torch.no_grad()
@pytest.mark.parametrize("operation", ["add_", "setitem", "view"])
def test_in_place_writes_reach_the_values_that_share_memory(operation):
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            if operation == "add_":
                h.add_(0.1)
            elif operation == "setitem":
                h[:, :4] = h[:, 4:] * 3
            else:
                h[:, 2].mul_(7)
            return self.b(h)

    model, x = Writes(), torch.randn(3, 8)
    amp = amprewrite.rewrite(model, dtype="bf16")
    report = verify(amp, (x,))
    real = relative_error([amp(x)], [model(x)])
    assert report.output_error == pytest.approx(real, rel=0.2, abs=1e-4)


def test_a_model_may_write_an_input_that_wants_a_gradient_and_is_no_leaf():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x[:, 0] = 1.0
            return self.a(x)

    amp, x = amprewrite.rewrite(Writes(), dtype="bf16"), torch.randn(3, 8, requires_grad=True) * 2
    given = x.detach().clone()
    assert 0 < verify(amp, (x,)).output_error < 0.02
    assert torch.equal(x.detach(), given)


@torch.no_grad()
def test_a_plan_that_rounds_nothing_has_no_error():
    report = verify(amprewrite.rewrite(Chain(), dtype="fp32"), (torch.randn(2, 8),))
    assert (
        report.low == FP32.name
        and report.output_error == 0
        and all(row.introduced == row.accumulated == 0 for row in report.rows)
    )


@torch.no_grad()
def test_an_edited_plan_is_what_is_verified():
    model, x = Chain(), torch.randn(4, 8)
    plan = amprewrite.plan(model, (x,), dtype="bf16").edit({"linear_1": "high"})
    report = verify(amprewrite.rewrite(model, plan=plan), (x,))
    assert next(row for row in report.rows if row.name == "linear_1").colour is Colour.HIGH


@torch.no_grad()
def test_complex_results_have_errors() -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(self.linear(x)).conj()

    model, x = Spectrum(), torch.randn(8, 16)
    amp = amprewrite.rewrite(model, dtype="bf16")
    with torch.no_grad():
        got, want = amp(x), model(x)
    assert verify(amp, (x,)).output_error == pytest.approx(((got - want).norm() / want.norm()).item(), rel=0.1)


def test_the_report_fits_its_page():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(20)])
    report = verify(amprewrite.rewrite(model, dtype="bf16"), (torch.randn(2, 8),))
    text = str(report)
    assert all(len(line) <= 100 for line in text.splitlines()) and "and " in text.splitlines()[-1]
    by_error = [row.accumulated for row in report.worst(5)]
    assert by_error == sorted(by_error, reverse=True) and len(by_error) == 5
    assert report.worst(1, by="introduced")[0].introduced == max(row.introduced for row in report.rows)


@torch.no_grad()
def test_results_that_are_nan_in_fp32_are_told() -> None:
    """Without a note, a model whose results are all NaN has an error of zero."""

    class Logs(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x @ x, (-(x @ x).square() - 1).log()

    report = verify(amprewrite.rewrite(Logs(), dtype="bf16"), (torch.randn(8, 8),))
    assert "results 1 hold NaN in fp32, too" in str(report)
    assert not any("NaN" in note for note in verify(amprewrite.rewrite(Chain(), dtype="bf16"), (torch.randn(3, 8),)).notes)


def test_control_flow_that_rounding_turns_is_said():
    class Forks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1)
            nn.init.constant_(self.a.weight, 1 + 2**-12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            return self.b(h) if h.sum() > 1 else torch.relu(self.b(h * 3))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = verify(amprewrite.rewrite(Forks(), dtype="bf16"), (torch.ones(1, 1),))
    assert isinstance(report, Report) and "another way" in str(report)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        pytest.param(lambda: verify(nn.Linear(2, 2), (torch.ones(1, 2),)), "rewritten model", id="plain model"),
        pytest.param(lambda: verify(amprewrite.rewrite(nn.Linear(2, 2)), torch.ones(1, 2)), "tuple", id="no tuple"),
    ],
)
def test_bad_input_is_told_what_to_do(call, says):
    with pytest.raises(amprewrite.PolicyError, match=says):
        call()


def test_a_checkpoint_that_returns_what_it_reads() -> None:
    """Its body is read once, at capture: later the facts that tell what leaves it are gone."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def body(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                t = self.inner(t)
                return t, t.relu()

            first, _ = checkpoint(body, x, use_reentrant=False)  # type: ignore[misc]
            return first

    amp = amprewrite.rewrite(Kept(), dtype="bf16")
    report = verify(amp, (torch.randn(2, 4),))
    assert 0 < report.output_error < 1e-2 and any(row.name.endswith("/linear") and row.colour.value == "low" for row in report.rows)


def test_views_of_rounded_values_may_be_written() -> None:
    """By a model that takes gradients itself: they flow while it is verified."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            part = y[..., 0]
            part.add_(2)
            return self.last(y) + torch.func.jacrev(lambda t: (t * t).sum(-1))(x[0])

    torch.manual_seed(0)
    amp, x = amprewrite.rewrite(Writes(), dtype="fp16"), torch.randn(4, 8)
    assert 0 < verify(amp, (x,)).output_error < 5e-3


class Expanded(nn.Module):
    """Writes a row of a value whose rows all lie in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        rows = torch.broadcast_to(self.linear(x) + 1, (2, *x.shape))
        rows[0] = rows[-1].clone() * 2
        return rows


def test_memory_that_elements_share_is_rounded_once():
    torch.manual_seed(0)
    model, x = Expanded(), torch.randn(3, 4)
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="bf16", lists="o3")
    with torch.no_grad():
        got, want = amp(x), model(x)
        report = amprewrite.verify(amp, (x,))
    true = float((got - want).norm() / want.norm())
    assert 0.5 * true < report.output_error < 2 * true < 2e-2


class Magnified(nn.Module):
    """A difference of low values, exact in itself, that is nothing but what they lost; and an infinity made of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.load_state_dict({name: value * (1 + 1e-4) for name, value in self.a.state_dict().items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart = self.a(x) - self.b(x)
        return self.a(apart) + (1 / apart).relu()


def test_a_difference_that_rounds_nothing_and_loses_all_is_printed():
    report = verify(amprewrite.rewrite(Magnified(), dtype="bf16", overrides={"sub": "low"}), (torch.randn(4, 8),))
    row = next(row for row in report.rows if row.name == "sub")
    assert row.introduced == 0 and row.accumulated > 1
    assert "\nsub " in report.table()
