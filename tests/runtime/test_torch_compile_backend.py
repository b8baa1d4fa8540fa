"""`torch.compile(model, backend="amprewrite")`: the graphs that Dynamo captures are those of `rewrite`, training included."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import tomllib
import weakref
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_help import BatchMean, Broken, data, low, mlp
from torch import nn

import amprewrite
from amprewrite import AmpRewriteWarning, PlanError, PolicyError
from amprewrite.runtime.captured.look_ahead import CALLS, LookAhead

ROOT = Path(__file__).resolve().parents[2]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.inner(x))


def compiled(model: Any, *, fullgraph: bool = False, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend=amprewrite.compile_backend, fullgraph=fullgraph, options={"dtype": "bf16", **options})


def train(run: Any, optimizer: torch.optim.Optimizer, steps: int, large_at: int = -1) -> list[float]:
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = run(data(seed=step)).square().mean()
        (loss * (1e30 if step == large_at else 1)).backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("grad", [True, False])
def test_in_fp16_only_the_first_calls_run_in_fp32_before(grad, monkeypatch):
    looks, look = [], LookAhead.look
    monkeypatch.setattr(LookAhead, "look", lambda self, *args: looks.append(1) or look(self, *args))
    run = compiled(mlp(), dtype="fp16")
    with torch.set_grad_enabled(grad):
        for _ in range(2 * CALLS):
            run(data())
    assert len(looks) == CALLS


def test_it_computes_what_rewrite_does():
    model, x = mlp(), data()
    run = compiled(model, fullgraph=True)
    assert torch.equal(run(x), low(model)(x))
    assert run(x).dtype is torch.float32 and amprewrite.compiled(run).plan.low == "bf16"
    with torch.no_grad():
        assert torch.equal(run(x), low(model)(x))
    assert len(amprewrite.compiled(run).plan.regions) == 2
    assert str(amprewrite.compiled(model).plan) == str(amprewrite.compiled(run).plan)


@pytest.mark.parametrize("first_inside", [True, False])
def test_a_region_of_the_caller_changes_nothing(first_inside):
    """A region around code behind a graph break counts in rewritten models alone: here it is the caller's."""
    model, x = mlp(), data()
    run, found = compiled(model), []
    with torch.no_grad():
        for inside in (first_inside, not first_inside):
            with torch.autocast("cpu", enabled=False) if inside else contextlib.nullcontext():
                found.append(run(x))
            torch._dynamo.reset()
        assert torch.equal(*found) and not torch.equal(found[0], model(x))


def test_the_layer_that_an_override_names_stays_fp32():
    model, x = mlp(), data()
    run = compiled(model, overrides={"module:second": "fp32"})
    assert torch.equal(run(x), low(model, overrides={"module:second": "fp32"})(x))
    amprewrite.compiled(run).check_patterns()
    run = compiled(model, overrides={"module:thrid": "fp32"})
    run(x)
    with pytest.raises(PolicyError, match="matches no module"):
        amprewrite.compiled(run).check_patterns()


def test_training_in_fp16_is_bitwise_that_of_a_rewritten_model():
    def losses(by_rewrite: bool) -> tuple[list[float], Any]:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if by_rewrite:
            run = amprewrite.rewrite(model, dtype="fp16")
            return train(run, optimizer, 8, large_at=3), run.loss_scale.report()
        run = compiled(model, dtype="fp16")
        return train(run, optimizer, 8, large_at=3), amprewrite.compiled(run).loss_scale.report()

    (ours, report), (theirs, expected) = losses(False), losses(True)
    assert ours == theirs
    assert (report.steps, report.skipped, report.scale) == (expected.steps, expected.skipped, expected.scale)
    assert report.skipped == 1


def test_graphs_around_a_break_have_one_loss_scale():
    torch.manual_seed(0)
    model = Broken()
    run = compiled(model, dtype="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(run, optimizer, 3)
    found = amprewrite.compiled(model)
    assert len(found.plan.regions) == 2 and any("graph break" in part.why for part in found.plan.skipped)
    assert found.loss_scale.report().steps == 3 and len(optimizer._optimizer_step_pre_hooks) == 1


def test_a_function_with_the_model_in_a_closure_and_the_loss_inside():
    model, x = mlp(), data()

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    run = compiled(loss_of, dtype="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    (run(x) * torch.inf).backward()
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert amprewrite.compiled(model).loss_scale.report().skipped == 1


def test_two_models_have_two_loss_scales():
    first, second = mlp(0), mlp(1)
    runs = [compiled(first, dtype="fp16"), torch.compile(second, backend=amprewrite.compile_backend, options={"dtype": "fp16"})]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    for run, optimizer, factor in zip(runs, optimizers, (torch.inf, 1.0), strict=True):
        (run(data()) * factor).mean().backward()
        optimizer.step()
    assert [amprewrite.compiled(each).loss_scale.report().skipped for each in (first, second)] == [1, 0]


def test_models_that_share_code_share_no_decision():
    """Dynamo runs the first model's graph for the second: a weight that fp16 cannot hold stays fp32 all the same."""
    first, second = mlp(0), mlp(1)
    with torch.no_grad():
        second.second.weight.mul_(1e6)
    run = compiled(first, dtype="fp16")
    run(data())
    other = torch.compile(second, backend=amprewrite.compile_backend, options={"dtype": "fp16"})
    for _ in range(2):
        assert (other(data()) - second(data())).norm() < 1e-2 * second(data()).norm()
        assert torch.equal(run(data()), amprewrite.rewrite(first, dtype="fp16")(data()))


@pytest.mark.long
def test_a_graph_of_all_sizes_serves_a_second_model_in_all_sizes():
    models = BatchMean(0), BatchMean(1)
    runs = [torch.compile(m, backend="amprewrite", options={"dtype": "bf16", "backend": "aot_eager"}, dynamic=True) for m in models]
    for index, rows in ((0, 16), (0, 24), (1, 16), (1, 24), (1, 40)):
        x = torch.randn(rows, 8)
        got, wanted = runs[index](x), models[index](x)
        assert (got - wanted).norm() < 0.02 * wanted.norm()
        ours, exact = (torch.autograd.grad(y.square().sum(), models[index].parameters()) for y in (got, wanted))
        assert all((a - b).norm() < 0.05 * b.norm() for a, b in zip(ours, exact, strict=True))


def test_blocks_compiled_one_by_one_are_all_guarded():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(10)))
    torch._dynamo.reset()
    for block in model:
        block.compile(backend=amprewrite.compile_backend, options={"dtype": "fp16"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = [p.detach().clone() for p in model.parameters()]
    (model(data()) * torch.inf).mean().backward()
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert [amprewrite.compiled(block).loss_scale.report().skipped for block in model] == [1] * 10
    losses = train(model, optimizer, 20)
    assert losses[-1] < losses[0] and len({amprewrite.compiled(block).loss_scale.value for block in model}) == 1


def test_the_compiler_behind_it_is_an_option():
    model, x = mlp(), data()
    run = compiled(model, backend="aot_eager", fullgraph=True)
    result = run(x)
    result.sum().backward()
    assert (result - low(model)(x)).norm() < 1e-2 * result.norm()
    assert model.first.weight.grad is not None and model.first.weight.grad.dtype is torch.float32


def test_new_shapes_and_modes_go_on_with_the_session():
    model = mlp()
    run = compiled(model, dtype="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(run, optimizer, 2)
    model.eval()
    with torch.no_grad():
        run(data(5, 8))
    model.train()
    train(run, optimizer, 2)
    assert amprewrite.compiled(model).loss_scale.report().steps == 4


def test_module_compile_takes_it_too():
    model, x = mlp(), data()
    expected = low(model)(x)
    model.compile(backend=amprewrite.compile_backend, options={"dtype": "bf16"})
    assert torch.equal(model(x), expected)


def test_a_compiled_model_can_go():
    model = mlp()
    run = compiled(model, dtype="fp16")
    train(run, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    gone = weakref.ref(model)
    del model, run
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"inplace": True}, "does not understand the option 'inplace'"),
        ({"dtype": "int3"}, "int3"),
        ({"backend": amprewrite.compile_backend}, "would rewrite a rewritten graph"),
        ({"backend": "amprewrite"}, "would rewrite a rewritten graph"),
        ({"backend": "no_such"}, "is no torch.compile backend"),
    ],
    ids=lambda each: str(each)[:20],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], says: str):
    with pytest.raises(Exception, match=says) as caught:
        compiled(mlp(), **options)(data())
    assert isinstance(caught.value.__cause__ or caught.value.inner_exception, PolicyError)


def test_a_mode_of_inductor_is_refused():
    with pytest.raises(Exception, match="takes no mode='max-autotune'"):
        torch.compile(mlp(), backend=amprewrite.compile_backend, mode="max-autotune")(data())


def test_autocast_around_it_is_refused():
    run = compiled(mlp())
    with pytest.raises(Exception, match=r"inside torch\.autocast"), torch.autocast("cpu", torch.bfloat16):
        run(data())


def test_a_node_that_no_graph_has_is_said():
    run = compiled(mlp(), overrides={"node:linaer": "fp32"})
    with pytest.warns(AmpRewriteWarning, match="matches no node"):
        run(data())


def test_a_hook_on_a_given_tensor_that_is_written_is_left_to_the_code_as_written():
    """torch.compile alone puts it on what was written, and says nothing."""

    class Hooks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
            x.mul_(3)
            return self.inner(x)

    model, gradients = Hooks(), []
    run = compiled(model)
    for each in (model, run):
        leaf = data().requires_grad_()
        with pytest.warns(AmpRewriteWarning, match="gets a hook") if each is run else contextlib.nullcontext():
            each(leaf + 0).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    with pytest.raises(Exception, match="a tensor that it is given gets a hook"):
        compiled(model, fullgraph=True)(data().requires_grad_() + 0)


def test_what_was_not_captured_has_no_plan():
    with pytest.raises(PlanError, match="has captured nothing"):
        amprewrite.compiled(nn.Linear(2, 2))
    with pytest.raises(PolicyError, match="takes a module"):
        amprewrite.compiled(lambda x: x)


def test_a_forward_that_dynamo_gives_up_says_where_to_look():
    model = torch.compile(nn.GRU(4, 4), backend=amprewrite.compile_backend, options={"dtype": "bf16"})
    model(torch.randn(3, 2, 4))
    with pytest.raises(PlanError, match=r"captured nothing of this \w+; .* an LSTM or GRU, TORCH_LOGS=graph_breaks says why"):
        amprewrite.compiled(model)


def test_the_entry_point_names_it():
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    module, _, name = group["amprewrite"].partition(":")
    assert getattr(import_module(module), name) is amprewrite.compile_backend


@pytest.mark.long
def test_an_installed_package_is_found_by_name(tmp_path: Path):
    """Dynamo reads entry points, so the name needs no import of amprewrite."""
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    info = tmp_path / "amprewrite_entry-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: amprewrite-entry\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\namprewrite = {group['amprewrite']}\n")
    script = """
        import sys, torch
        torch.manual_seed(0)
        model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
        assert "amprewrite" not in sys.modules
        result = torch.compile(model, backend="amprewrite", options={"dtype": "bf16"})(x)
        import amprewrite
        print(torch.equal(result, amprewrite.rewrite(model, dtype="bf16")(x)), amprewrite.compiled(model).plan.low)
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=200, env=env)
    assert done.stdout.strip() == "True bf16", done.stderr[-2000:]
