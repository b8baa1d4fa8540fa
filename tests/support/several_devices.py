"""Models on several devices in one process; tests/runtime/test_several_devices.py runs this file in a process of its own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import two_devices
from layouts import LAYOUTS, WIDTH, Halves, error, gradients
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite

FIRST, SECOND = f"{two_devices.NAME}:0", f"{two_devices.NAME}:1"
ROWS = 16
FORMATS = pytest.mark.parametrize("dtype", ["bf16", "fp16"])
BOUND = {"bf16": 3e-2, "fp16": 4e-3}


@pytest.fixture(scope="module", autouse=True)
def accelerator(tmp_path_factory: pytest.TempPathFactory) -> None:
    two_devices.register(Path(tmp_path_factory.mktemp("two_devices")))


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


EACH = pytest.mark.parametrize("layout", LAYOUTS)
WAYS = pytest.mark.parametrize(
    "options", [{}, {"cache_weights": "step"}, {"cache_weights": False}, {"backend": "aot_eager"}], ids=["", "step", "inside", "compiled"]
)


def data() -> Tensor:
    return torch.randn(ROWS, WIDTH).to(FIRST)


@EACH
@FORMATS
@WAYS
def test_gradients_are_those_of_fp32(layout: Callable[[str, str], nn.Module], dtype: str, options: dict[str, object]) -> None:
    model, x = layout(FIRST, SECOND), data()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = amprewrite.rewrite(model, optimizer=optimizer, dtype=dtype, **options)
    for _ in range(3):
        plain.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        plain.zero_grad()
        out, want = amp(x), plain(x)
        assert out.device == want.device and out.dtype == want.dtype
        out.square().mean().backward()
        want.square().mean().backward()
        assert error(gradients(amp), gradients(plain)) < BOUND[dtype]
        optimizer.step()
    assert any(cast.weight for region in amp.plan.regions for cast in region.casts)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert error(amp(x).cpu(), plain(x).cpu()) < BOUND[dtype]


@EACH
def test_an_overflow_on_one_device_skips_the_step_on_all(layout: Callable[[str, str], nn.Module]) -> None:
    model, x = layout(FIRST, SECOND), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    amp = amprewrite.rewrite(model, optimizer=optimizer, dtype="fp16", loss_scale=amprewrite.DynamicLossScale(init=2.0**14))
    for overflows in (False, True, False):
        optimizer.zero_grad()
        (amp(x).square().mean() * (1e30 if overflows else 1.0)).backward()
        before = [p.detach().cpu().clone() for p in model.parameters()]
        optimizer.step()
        moved = [not torch.equal(old, p.detach().cpu()) for old, p in zip(before, model.parameters(), strict=True)]
        assert not any(moved) if overflows else all(moved)
    report = amp.loss_scale.report()
    assert (report.steps, report.skipped, amp.loss_scale.value) == (3, 1, 2.0**13)


@FORMATS
def test_a_pipeline_by_hand_of_two_rewritten_stages(dtype: str) -> None:
    stages = [nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU()).to(FIRST), nn.Sequential(nn.LayerNorm(64), nn.Linear(64, WIDTH)).to(SECOND)]
    plain, x = copy.deepcopy(stages), data()
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()])
    first, second = (amprewrite.rewrite(stage, optimizer=optimizer, dtype=dtype) for stage in stages)
    second(first(x).to(SECOND)).square().mean().backward()
    plain[1](plain[0](x).to(SECOND)).square().mean().backward()
    assert error(gradients(nn.ModuleList(stages)), gradients(nn.ModuleList(plain))) < BOUND[dtype]


def test_second_derivatives_cross_devices() -> None:
    model, x = Halves(FIRST, SECOND), data()
    plain = copy.deepcopy(model)
    for each in (amprewrite.rewrite(model, dtype="fp16", loss_scale=1024.0), plain):
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(each(given).square().mean(), given, create_graph=True)
        slope.square().sum().backward()
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True) if q.grad is not None]
    assert error(torch.cat([got.cpu().flatten() for got, _ in pairs]), torch.cat([want.cpu().flatten() for _, want in pairs])) < 1e-2


class Net(nn.Module):
    """Tied weights, a norm, and dims that are odd."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.table.weight
        self.body = nn.Sequential(nn.Linear(WIDTH, 65), nn.GELU(), nn.LayerNorm(65), nn.Linear(65, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.table(x)))


@FORMATS
def test_data_parallel_trains_as_fp32_does(dtype: str) -> None:
    model = Net().to(FIRST)
    plain = nn.DataParallel(copy.deepcopy(model), device_ids=[0, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scale = amprewrite.DynamicLossScale(init=2.0**10) if dtype == "fp16" else "auto"
    amp = amprewrite.rewrite(model, dtype=dtype, loss_scale=scale)
    data_parallel = nn.DataParallel(amp, device_ids=[0, 1])
    captured = 0
    for step in range(4):
        plain.module.load_state_dict(model.state_dict())
        x = torch.randint(0, WIDTH, (64,)).to(FIRST)
        optimizer.zero_grad()
        plain.zero_grad()
        out = data_parallel(x)
        assert out.device == torch.device(FIRST) and out.dtype == torch.float32
        F.cross_entropy(out, x).backward()
        F.cross_entropy(plain(x), x).backward()
        assert error(gradients(model), gradients(plain)) < BOUND[dtype]
        optimizer.step()
        graphs = len(amp.plans)
        assert step == 0 or graphs == captured, "each device has one graph, however many replicas there were"
        captured = graphs


def test_an_overflow_in_one_replica_skips_the_step() -> None:
    model = Net().to(FIRST)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    amp = amprewrite.rewrite(model, dtype="fp16", optimizer=optimizer, loss_scale=amprewrite.DynamicLossScale(init=2.0**10))
    data_parallel, x = nn.DataParallel(amp, device_ids=[0, 1]), torch.randint(0, WIDTH, (64,)).to(FIRST)
    weights = torch.ones(64)
    for last in (1.0, 1e30, 1.0):
        optimizer.zero_grad()
        weights[-1] = last  # a row of the second replica
        (F.cross_entropy(data_parallel(x), x, reduction="none") * weights.to(FIRST)).mean().backward()
        before = [p.detach().cpu().clone() for p in model.parameters()]
        optimizer.step()
        assert all(torch.equal(old, p.detach().cpu()) == (last > 1) for old, p in zip(before, model.parameters(), strict=True))
    assert (amp.loss_scale.report().skipped, amp.loss_scale.value) == (1, 2.0**9)


@FORMATS
@pytest.mark.parametrize("hooks_first", [True, False])
@pytest.mark.parametrize(
    "places", [{"table": FIRST, "body": SECOND, "head": FIRST}, {"table": "cpu", "body": SECOND, "head": SECOND}, None]
)
def test_hooks_of_accelerate_move_values_and_weights(places: dict[str, str] | None, hooks_first: bool, dtype: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    parts = {"table": nn.Embedding(WIDTH, WIDTH), "body": nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU()), "head": nn.Linear(64, WIDTH)}
    model = nn.Sequential(OrderedDict(parts))
    plain, x = copy.deepcopy(model), torch.randint(0, WIDTH, (ROWS,))

    def placed(module: nn.Module) -> nn.Module:
        if places is None:
            return accelerate.cpu_offload(module, execution_device=FIRST)
        return accelerate.dispatch_model(module, device_map=places, main_device=SECOND, force_hooks=True)

    with pytest.warns(amprewrite.AmpRewriteWarning, match="runs as it is written"):  # what accelerate wraps around a module
        amp = amprewrite.rewrite(placed(model), dtype=dtype) if hooks_first else placed(amprewrite.rewrite(model, dtype=dtype))
        with torch.no_grad():
            amp(x)
            assert error(amp(x), plain(x)) < BOUND[dtype]
    if places is not None and "cpu" not in places.values():  # accelerate trains no weights that it offloads
        amp(x).square().mean().backward()
        plain(x).square().mean().backward()
        assert error(gradients(amp), gradients(plain)) < BOUND[dtype]


def test_the_trainer_wraps_a_model_in_data_parallel_by_itself(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    state = pytest.importorskip("accelerate.state")
    from amprewrite.integrations.transformers import AmpRewriteCallback

    class Arguments(transformers.TrainingArguments):  # type: ignore[name-defined, misc]
        """Those of a machine with two devices, which accelerate does not know by name."""

        @property
        def device(self) -> torch.device:
            _ = self._setup_devices
            state.PartialState._shared_state["device"] = torch.device(FIRST)
            return torch.device(FIRST)

        n_gpu = property(lambda self: 2)

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    rows = [(torch.arange(32) * (k % 5 + 1) + k) % 64 for k in range(64)]

    def losses(*callbacks: object) -> list[float]:
        torch.manual_seed(0)
        arguments = Arguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=6, logging_steps=2, report_to=[], save_strategy="no",
            learning_rate=1e-3, disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks))
        trainer.train()
        assert isinstance(trainer.model_wrapped, nn.DataParallel)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    want = losses()
    for dtype in ("bf16", "fp16"):
        assert losses(AmpRewriteCallback(dtype=dtype)) == pytest.approx(want, rel=2e-3)
