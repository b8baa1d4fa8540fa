"""The debugger names what was made to go wrong, with its source line, and finds the nodes that mend it."""

from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.accuracy.debug import DebugReport, debug
from amprewrite.tables.errors import PolicyError


def line_of(cls: type, text: str) -> str:
    """ "file:line" of the line of `cls` that holds `text`."""
    lines, first = inspect.getsourcelines(cls)
    (offset,) = [offset for offset, line in enumerate(lines) if text in line]
    return f"test_debug.py:{first + offset}"


class Faulty(nn.Module):
    """A healthy network with an overflow and a loss of precision put in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown = torch.relu(self.first(x)) * 800.0 * 800.0
        x = self.second(torch.clamp(grown, max=1e30) / 800.0 / 800.0)
        offset = x + 2000.0
        x = offset - 2000.0
        return self.third(x)


class Healthy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Vanishing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tiny = self.first(x) * 1e-7
        return self.second(tiny)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def report_of(model: nn.Module, x: torch.Tensor, dtype: str = "fp16", **options: object) -> DebugReport:
    return debug(amprewrite.rewrite(model, dtype=dtype), (x,), **options)  # type: ignore[arg-type]


def test_an_overflow_and_a_loss_of_precision_are_named_with_their_lines() -> None:
    report = report_of(Faulty(), torch.randn(16, 32) * 4)
    kinds = {finding.kind: finding for finding in reversed(report.findings) if not finding.backward}
    assert kinds.keys() == {"overflow", "cancellation"}
    assert kinds["overflow"].lost_at.source == line_of(Faulty, "* 800.0 * 800.0")
    assert report.first_bad is kinds["overflow"]
    report = report_of(Faulty(), torch.randn(16, 32) * 4, "bf16")
    (only,) = report.findings
    assert only.kind == "cancellation"
    assert only.row.source == line_of(Faulty, "offset - 2000.0")
    assert only.lost_at.source == line_of(Faulty, "x + 2000.0")
    assert f"add ({only.lost_at.source})" in str(report)


def test_underflow_is_named() -> None:
    report = report_of(Vanishing(), torch.randn(8, 16))
    assert report.first_bad is not None
    assert (report.first_bad.kind, report.first_bad.row.source) == ("underflow", line_of(Vanishing, "* 1e-7"))
    assert report_of(Vanishing(), torch.randn(8, 16), "bf16").findings == ()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_healthy_model_has_no_finding(dtype: str) -> None:
    report = report_of(Healthy(), torch.randn(8, 32), dtype)
    assert report.findings == () and report.first_bad is None
    assert "errors are rounding as usual" in str(report)


def test_errors_are_split_into_inherited_and_introduced() -> None:
    report = report_of(Healthy(), torch.randn(8, 32), "bf16")
    rows = {row.name: row for row in report.rows}
    first, last = rows["linear"], rows["linear_1"]
    assert 0 < first.inherited < last.inherited
    for row in report.rows:
        assert row.accumulated <= (row.inherited + row.introduced) * 1.001 + 1e-12
        assert 0 <= row.smallest <= row.largest
    assert set(first.inputs) == {"layer_norm -> bf16", "up.weight -> bf16", "up.bias -> bf16"}


def test_backward_rounds_gradients_and_compares_them() -> None:
    model = Healthy()
    x = torch.randn(8, 32)
    report = report_of(model, x, "bf16", backward=True, loss=lambda y: y.square().mean())
    assert {row.name for row in report.gradient_rows} >= {"linear", "linear_1", "up.weight", "down.weight"}
    assert report.gradients.keys() == {name for name, _ in model.named_parameters()}
    assert all(0 < error < 0.05 for error in report.gradients.values())
    assert all(p.grad is None for p in model.parameters())


def test_gradients_agree_with_those_of_the_rewritten_model() -> None:
    """bf16 matmuls of a CPU accumulate in fp32, so the interpreter and the kernels differ by roundings alone."""
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(64, 16)
    amp = amprewrite.rewrite(model, dtype="bf16")
    report = debug(amp, (x,), backward=True, loss=lambda y: y.square().mean())
    model(x).square().mean().backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    amp(x).square().mean().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        real = ((p.grad - exact[name]).norm() / exact[name].norm()).item()
        assert report.gradients[name] == pytest.approx(real, rel=0.7, abs=1e-4), name


def test_the_loss_of_an_output_may_be_an_item() -> None:
    class WithLoss(Healthy):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            y = super().forward(x)
            return {"loss": y.square().mean(), "logits": y * 100}

    model, x = amprewrite.rewrite(WithLoss().train(), dtype="fp16"), torch.randn(16, 32)
    assert debug(model, (x,)).gradients == debug(model, (x,), loss=lambda output: output["loss"]).gradients


def test_gradients_that_vanish_are_named_and_a_loss_scale_mends_it() -> None:
    model, x = Healthy(), torch.randn(8, 32)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return (y.square().mean()) * 1e-6

    bare = debug(amprewrite.rewrite(model, dtype="fp16", loss_scale=None), (x,), backward=True, loss=loss)
    assert {finding.kind for finding in bare.findings if finding.backward} == {"underflow"}
    scaled = debug(amprewrite.rewrite(model, dtype="fp16", loss_scale=2.0**16), (x,), backward=True, loss=loss)
    assert scaled.findings == ()
    assert max(scaled.gradients.values()) < 0.1 * max(bare.gradients.values())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_suggested_overrides_mend_the_model_and_none_is_idle(dtype: str) -> None:
    model, x = Faulty(), torch.randn(16, 32) * 4
    report = report_of(model, x, dtype)
    target = 0.02
    asked = report.suggest_overrides(target)
    assert report.output_error > target
    assert 1 <= len(asked) <= 6 and set(asked.values()) == {"fp32"}
    assert report_of_overrides(model, x, dtype, asked) <= target
    for key in asked:
        fewer = {k: v for k, v in asked.items() if k != key}
        assert report_of_overrides(model, x, dtype, fewer) > target, f"{key} is idle"


def report_of_overrides(model: nn.Module, x: torch.Tensor, dtype: str, overrides: dict[str, str]) -> float:
    return amprewrite.verify(amprewrite.rewrite(model, dtype=dtype, overrides=overrides), (x,)).output_error


def test_no_override_is_suggested_where_none_is_needed_and_own_ones_are_kept() -> None:
    amp = amprewrite.rewrite(Healthy(), dtype="bf16", overrides={"module:down": "fp32"})
    assert debug(amp, (torch.randn(8, 32),)).suggest_overrides() == {"module:down": "high"}


def test_own_overrides_with_a_wildcard_give_way_to_nodes_that_must_be_kept() -> None:
    model, x = Faulty(), torch.randn(16, 32) * 4
    amp = amprewrite.rewrite(model, dtype="bf16", overrides={"node:linear*": "low", "node:[!l]*": "low"})
    asked = debug(amp, (x,)).suggest_overrides(0.02)
    assert asked["node:linear*"] == asked["node:relu"] == "low" and asked["node:add"] == asked["node:sub"] == "fp32"
    assert report_of_overrides(model, x, "bf16", asked) <= 0.02


def test_a_copy_of_a_frozen_model_has_the_same_suggestions() -> None:
    """They are for a rewrite of its own, which does not start from the colours of the frozen model."""
    layers = nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 32)
    amp, x = amprewrite.rewrite(nn.Sequential(*layers).eval(), dtype="bf16"), torch.randn(8, 32)
    amp.freeze(x)
    wanted, found = (debug(model, (x,)).suggest_overrides(1e-5) for model in (amp, copy.deepcopy(amp)))
    assert found == wanted


def test_a_target_beyond_any_rounding_keeps_everything_high() -> None:
    model, x = Healthy(), torch.randn(8, 32)
    report = report_of(model, x, "bf16")
    with pytest.raises(PolicyError, match="no error to aim at"):
        report.suggest_overrides(0.0)
    asked = report.suggest_overrides(1e-30)
    assert report_of_overrides(model, x, "bf16", asked) == 0


def test_several_graphs_are_debugged_as_one() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Healthy(), Healthy()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    report = report_of(Broken(), torch.randn(8, 32), "bf16", backward=True)
    assert {row.name.partition("/")[0] for row in report.rows} == {"graph0", "graph1"}
    assert {row.name.partition("/")[0] for row in report.gradient_rows} == {"graph0", "graph1"}
    assert math.isfinite(report.output_error) and report.findings == ()


def test_op_table_and_tables_fit() -> None:
    report = report_of(Faulty(), torch.randn(16, 32), "bf16", backward=True)
    lines = report.op_table().splitlines()
    assert lines[0].split() == ["op", "bf16", "fp32", "FLOPs", "bf16", "FLOPs", "fp32"]
    assert lines[1].split()[:3] == ["linear", "3", "-"]
    assert max(map(len, str(report).splitlines()[3:])) <= 120


def test_bad_input() -> None:
    amp = amprewrite.rewrite(Healthy(), dtype="bf16")
    with pytest.raises(PolicyError, match="debug takes a rewritten model"):
        debug(Healthy(), (torch.randn(8, 32),))
    with pytest.raises(PolicyError, match=r"debug takes the arguments as a tuple"):
        debug(amp, torch.randn(8, 32))  # type: ignore[arg-type]
    with torch.no_grad(), pytest.raises(PolicyError, match="needs gradients"):
        debug(amp, (torch.randn(8, 32),), backward=True)
    with pytest.raises(PolicyError, match="0-dim tensor with a gradient"):
        debug(amp, (torch.randn(8, 32),), backward=True, loss=lambda y: y)
