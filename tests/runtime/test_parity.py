"""One plan for all graphs of a model: training, evaluation, inference and exports compute the same numbers."""

from __future__ import annotations

import pytest
import torch
from runtime_help import low
from tiers import long_beyond
from torch import nn
from torch._higher_order_ops import scan
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.passes.weigh_plans import PARITY
from amprewrite.tables.devices import named_device
from amprewrite.tables.vocabulary import Colour, Reason

FORMATS = ["bf16", "fp16"]


class Block(nn.Module):
    def __init__(self, width: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.norm, self.attend = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.norm_2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.0)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.attend(self.norm(x)).chunk(3, -1))
        x = x + self.dropout(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed and self.training:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


class Writer(nn.Module):
    """A small language model, which gives its last hidden state too, as those of transformers do."""

    def __init__(self, width: int = 32, layers: int = 2, checkpointed: bool = False) -> None:
        super().__init__()
        self.words, self.places, self.dropout = nn.Embedding(50, width), nn.Embedding(64, width), nn.Dropout(0.0)
        self.blocks = nn.ModuleList(Block(width, checkpointed) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.dropout(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        hidden = self.norm(x)
        return self.head(hidden).log_softmax(-1), hidden


def writer(**options: object) -> Writer:
    torch.manual_seed(0)
    model = Writer(**options)  # type: ignore[arg-type]
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(2)
    return model


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 50, shape or (2, 12), generator=torch.Generator().manual_seed(1))


def modes(model: nn.Module, x: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
    found = {"train": model.train()(x), "eval": model.eval()(x)}
    with torch.no_grad():
        found["no_grad"] = model(x)
        found["exported"] = model.export_program((x,)).module()(x)
    with torch.inference_mode():
        found["inference_mode"] = model(x)
    return found


def assert_alike(found: dict[str, tuple[torch.Tensor, ...]]) -> None:
    for way, results in found.items():
        for got, want in zip(results, found["train"], strict=True):
            assert torch.equal(got, want), way


def colours(plan: amprewrite.CastPlan) -> dict[str, Colour]:
    return {node.name.rpartition("/")[2]: node.colour for node in plan.nodes if node.role == "op"}


def low_ops(plan: amprewrite.CastPlan) -> set[str]:
    return {node.op for node in plan.nodes if node.colour is Colour.LOW}


def inference_plan(model: nn.Module, *args: torch.Tensor, **options: object) -> amprewrite.CastPlan:
    with torch.no_grad():
        return amprewrite.plan(model, args, dtype="bf16", **options)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    "options", [{}, {"granularity": "blocks"}, {"cache_weights": "step"}, {"parity": "eval"}, {"parity": 0.5}], ids=str
)
@pytest.mark.long
def test_all_ways_to_run_a_model_give_the_same_bits(dtype, options):
    amp = low(writer(), dtype=dtype, **options)
    assert_alike(modes(amp, ids()))
    assert any(colour is Colour.LOW for colour in colours(amp.plan).values())


def test_without_parity_they_do_not():
    found = modes(low(writer(), parity=False), ids())
    assert not torch.equal(found["train"][0], found["no_grad"][0])


@pytest.mark.parametrize("dtype", long_beyond(1, FORMATS))
def test_activation_checkpoints_change_nothing(dtype):
    assert_alike(modes(low(writer(checkpointed=True), dtype=dtype), ids()))


def test_plans_for_training_and_inference_do_not_differ():
    model = writer()
    assert amprewrite.plan(model, (ids(),), dtype="bf16").diff(inference_plan(model, ids())) == ""
    assert amprewrite.plan(model, (ids(),), dtype="bf16", parity=False).diff(inference_plan(model, ids(), parity=False)) != ""


@pytest.mark.parametrize("made", [torch.tanh, torch.sigmoid, lambda x: x.softmax(-1)], ids=["tanh", "sigmoid", "softmax"])
def test_results_that_a_backward_reads_run_alike_without_one(made):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = made(self.linear(x))
            return first, self.linear(first)

    torch.manual_seed(0)
    assert_alike(modes(low(Net()), torch.randn(4, 16)))


@pytest.mark.parametrize("first", ["train", "no_grad", "exported"])
@pytest.mark.long
def test_whatever_is_captured_first_decides_the_same(first):
    amp = low(writer())
    with torch.set_grad_enabled(first == "train"):
        before = amp.export_program((ids(),)).module()(ids()) if first == "exported" else amp(ids())
    assert_alike({"first": before, **modes(amp, ids())})
    assert torch.equal(before[0], low(writer())(ids())[0])


# sizes ----------------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Running all of it low is worth two casts where bytes count, and not where launches do."""

    def __init__(self, ops: int) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.embedding(x[:, 0].long(), torch.ones(4, 64, device="meta"))  # rows that are learnt may be rounded
        for _ in range(self.ops):
            x = F.relu(x)
        return x.bfloat16()  # a result in fp32 would need all of its bits


def launches(count: float) -> torch.Tensor:
    """A tensor on the meta device of which an A100 moves a byte an element while it launches `count` kernels."""
    row = named_device("a100")
    return torch.empty(int(count * row.launch * row.bandwidth) // 64, 64, device="meta")


def test_other_sizes_take_over_the_colours_of_the_first():
    model, small, large = Chain(8), launches(0.001), launches(10)
    own = [colours(amprewrite.plan(model, (x,), dtype="bf16", device="a100", parity=False)) for x in (small, large)]
    assert own[0] != own[1], "sizes that are planned alike show nothing"
    for first, then in ((small, large), (large, small)):
        torch._dynamo.reset()  # it has seen both sizes, and would capture one graph for all
        amp = low(model, device="a100")
        amp(first)
        decided = colours(amp.plan)
        amp(then)
        assert colours(amp.plans[-1]) == decided and len(amp.plans) == 2
        assert Reason.AGREED in {node.reason for node in amp.plans[-1].nodes}


def test_a_graph_that_another_one_runs_low_with_is_not_left_in_fp32():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    small, large = launches(0.001), launches(10)
    amp = amprewrite.rewrite(model, device="a100")
    amp(small)
    assert set(colours(amp.plan).values()) == {Colour.HIGH}  # by itself it only loses
    amp(large)
    amp(small)
    assert Colour.LOW in colours(amp.plan).values()


class Rooted(nn.Module):
    """An op between products whose CPU kernel takes another path for the last elements of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.rsqrt(self.first(x).abs() + 1))


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_row_does_not_depend_on_its_batch(dtype):
    torch.manual_seed(0)
    amp, x = low(Rooted(), dtype=dtype), torch.randn(8, 16)
    with torch.no_grad():
        assert torch.equal(amp(x), torch.cat([amp(row) for row in x.split(1)]))
    assert low_ops(amp.plan) >= {"linear"}


@pytest.mark.parametrize("options", [{"lists": "o2"}, {"overrides": {"rsqrt": "low"}}, {"overrides": {"node:rsqrt": "low"}}], ids=str)
def test_who_asks_gets_the_kernel_that_rounds_twice(options):
    x = torch.randn(8, 16)
    assert "rsqrt" not in low_ops(amprewrite.plan(Rooted(), (x,), dtype="bf16"))
    assert "rsqrt" in low_ops(amprewrite.plan(Rooted(), (x,), dtype="bf16", **options))


def test_devices_whose_kernels_round_alike_run_it_low():
    with torch.device("meta"):
        plan = amprewrite.plan(Rooted(), (torch.empty(512, 16),), dtype="bf16", device="a100")
    assert "rsqrt" in low_ops(plan)


# what only one graph knows --------------------------------------------------------------------------------------------


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)) * 0.001)


class GrowingInScan(Growing):
    """Its products are in the body of a scan, whose values no sample run shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(carried: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return carried + row, F.linear(F.relu(F.linear(row, self.first.weight)) * 0.001, self.second.weight)

        return scan(step, torch.zeros_like(x[0]), x)[1]


@pytest.mark.parametrize("net", [Growing, GrowingInScan])
def test_what_overflows_in_one_graph_is_high_in_exports_and_other_calls(net):
    torch.manual_seed(0)
    amp, large = low(net(), dtype="fp16"), 1e5 * torch.randn(4, 16)
    expected = amp(large)
    assert expected.isfinite().all()
    exported = amp.export_program((torch.randn(4, 16),)).module()
    with torch.no_grad():
        for other in (amp, exported):  # PyTorch runs the body of a scan by other kernels where there are gradients
            torch.testing.assert_close(other(large), expected, rtol=1e-5, atol=1e-5)


def test_what_overflows_in_one_graph_is_high_in_all():
    torch.manual_seed(0)
    amp, large = low(Growing(), dtype="fp16"), 1e5 * torch.randn(4, 16)
    amp(torch.randn(4, 16))
    with torch.no_grad():
        alone = amp(large)  # overflows, and is decided anew
    assert alone.isfinite().all()
    assert torch.equal(amp(large), alone)
    assert "captured anew: another graph keeps high" in "\n".join(amp.plan.notes)
    with torch.no_grad():
        assert torch.equal(amp(large), alone)
    captured = amp.plan, amp.plans
    amp(large)
    with torch.no_grad():
        assert torch.equal(amp(large), alone)
    assert (amp.plan, amp.plans) == captured, "agreeing comes to an end"


class Recomputed(nn.Module):
    """Calls a block under an activation checkpoint, and without gradients on values that overflow fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Growing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = checkpoint(self.block, x, use_reentrant=False)
        with torch.no_grad():
            self.block(1e5 * x)
        return result


def test_a_recomputation_runs_on_the_graphs_of_its_forward():
    torch.manual_seed(0)
    model, amp = Recomputed(), low(Recomputed(), dtype="fp16", granularity=["block"])
    model.load_state_dict(amp.state_dict())
    for net in (model, amp):
        x = torch.linspace(-1, 1, 64).reshape(4, 16)
        (net(x).sum() + net(2 * x).sum()).backward()  # the second forward captures anew what the first one ran
    assert "captured anew: another graph keeps high" in "\n".join(amp.plan.notes)
    for mine, theirs in zip(amp.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.01, atol=1e-4)


def test_the_plan_says_what_parity_costs():
    model, x = Chain(2), launches(0.35)  # in training a gradient is cast for three passes over the bytes, in inference for one
    found = inference_plan(model, x, device="a100")
    alone = inference_plan(model, x, device="a100", parity=False)
    assert Colour.LOW in colours(found).values() and Colour.LOW not in colours(alone).values()
    (note,) = [note for region in found.regions for note in region.notes if note.startswith(PARITY)]
    assert note in str(found) and note in amprewrite.CastPlan.from_json(found.to_json()).regions[0].notes
    assert PARITY not in str(amprewrite.plan(model, (x,), dtype="bf16", device="a100"))
    assert PARITY in str(amprewrite.plan(model, (x,), dtype="bf16", device="a100", parity="eval"))
    assert PARITY not in str(inference_plan(model, x, device="a100", parity="eval"))
    assert PARITY not in str(alone)


@pytest.mark.parametrize("parity", ["test", -0.1, 1.5, None, [1], "x" * 5000], ids=["word", "below", "above", "None", "list", "long"])
def test_other_values_are_refused(parity):
    with pytest.raises(amprewrite.PolicyError, match=r"parity=.* use 'train', 'eval', a number between 0 and 1, or False"):
        amprewrite.rewrite(writer(), parity=parity)


class Encodes(nn.Module):
    """Its work is done by a method, as `encode_image` does in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.text(self.image(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


def test_a_plan_shows_the_parts_that_a_method_called():
    amp = amprewrite.rewrite(Encodes(), dtype="bf16").eval()
    amp.encode(torch.randn(8, 64))
    assert [region.entry for region in amp.plan.regions] == ["image", "text", "norm"]
    assert [node.op for node in amp.plan.nodes if node.role == "op"] == ["linear", "linear", "layer_norm"]
    assert "low does 100.0 %" in amp.plan.summary()
    amp(torch.randn(8, 64))
    assert [region.entry for region in amp.plan.regions] == ["image", "text", "norm", ""]


def test_a_plan_shows_graphs_of_other_sizes_and_modes_once_and_says_how_many():
    torch._dynamo.reset()  # it may have seen other sizes, and would capture one graph for all
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64))
    amp = low(net)
    amp(torch.randn(8, 64)).sum().backward()
    first = amp.plan
    amp(torch.randn(9, 64)).sum().backward()
    amp.eval()
    with torch.no_grad():
        amp(torch.randn(9, 64))
    assert [region.nodes for region in amp.plan.regions] == [region.nodes for region in first.regions]
    assert all(node.reason is not Reason.AGREED for node in amp.plan.nodes)
    assert len(amp.plans) == 3 and [note for note in amp.plan.notes if note.startswith("2 more graphs")]
    assert amp.plan.regions[0].notes != first.regions[0].notes and amp.plan.regions[0].notes[-1].startswith("in inference: ")


def test_a_model_follows_the_plan_of_training_and_evaluation():
    """Batch norm counts its calls in training alone: one graph does not stand for the other."""
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 64))
    amp, x = low(net), torch.randn(8, 64)
    amp(x).sum().backward()
    with torch.no_grad():
        amp.eval()(x)
    again = amprewrite.rewrite(net.train(), plan=amp.plan)
    again(x).sum().backward()
    with torch.no_grad():
        assert torch.equal(again.eval()(x), amp.eval()(x))
    assert [region.training for region in again.plan.regions] == [True, False]


def test_an_op_that_follows_another_graph_has_the_reason_of_that_one():
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    amp = low(net)
    amp(torch.randn(8, 64)).sum().backward()
    first = {node.op: node.reason.value for node in amp.plan.nodes}
    with torch.no_grad():
        amp(torch.randn(8, 64))
    then = {node.op: node for node in amp.plans[-1].nodes}
    followed = [op for op, node in then.items() if node.reason is Reason.AGREED]
    assert {"gelu", "relu"} <= {*followed} and all(then[op].detail.startswith(first[op]) for op in followed)
