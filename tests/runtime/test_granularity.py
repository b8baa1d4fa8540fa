"""A model cut into blocks, each captured and rewritten by itself."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.accuracy.verify import verify
from amprewrite.runtime.options import part_paths
from amprewrite.tables.errors import PolicyError


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, checkpointed: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(12, 16), nn.Dropout(0.0)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4))
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.checkpointed else block(x)
        return self.head(x)


TOKENS = torch.arange(12).view(2, 6)


def net(**options: bool) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def gradients(call: nn.Module, model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    call(TOKENS).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, value in want.items():
        assert torch.linalg.vector_norm(got[name] - value) < 5e-3 * torch.linalg.vector_norm(value), name


@pytest.mark.parametrize(
    ("granularity", "parts"),
    [
        ("model", ()),
        ("blocks", ("embed", "blocks.0", "blocks.1", "blocks.2", "head")),
        (("blocks.1",), ("embed", "blocks.0", "blocks.1", "blocks.2", "head")),
        (("blocks",), ("embed", "blocks", "head")),
        (("blocks.*", "head.1"), ("embed", "blocks.0", "blocks.1", "blocks.2", "head.0", "head.1")),
    ],
)
def test_parts(granularity, parts):
    assert part_paths(net(), granularity) == parts


def test_of_blocks_within_blocks_the_outermost_counts():
    stage = nn.Sequential(Block(), Block())
    assert part_paths(nn.Sequential(stage, copy.deepcopy(stage), nn.Linear(16, 2)), "blocks") == ("0", "1", "2")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_blocks_train_as_fp32_does_with_one_graph_each(backend):
    model = net()
    amp = amprewrite.rewrite(model, dtype="fp16", granularity="blocks", loss_scale=2.0**10, backend=backend)
    got = gradients(amp, model)
    assert [region.entry for region in amp.plan.regions] == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert any("as it is written" in note for note in amp.plan.notes)
    assert {node.module for node in amp.plan.find("blocks.1")} >= {"blocks.1.up", "blocks.1.down"}
    assert_close(got, gradients(model, model))
    assert isinstance(amp.blocks[0], Block) and amp.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant):
    model = net(checkpointed=True, reentrant=reentrant)
    amp = amprewrite.rewrite(model, dtype="fp16", granularity="blocks", loss_scale=2.0**10)
    got = gradients(amp, model)
    assert_close(got, gradients(model, model))
    plain = amprewrite.rewrite(net(), dtype="fp16", granularity="blocks", loss_scale=2.0**10)
    for name, value in gradients(plain, plain).items():
        assert torch.equal(value, got[name]), name


def test_the_scale_is_that_of_one_forward_in_every_block():
    model = net()
    scale = amprewrite.DynamicLossScale(init=2.0**8, growth_interval=1)
    amp = amprewrite.rewrite(model, dtype="fp16", granularity="blocks", loss_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        want = gradients(model, model)
        assert_close(gradients(amp, model), want)
        optimizer.step()
    assert amp.loss_scale.value == 2.0**11
    assert len(amp.plans) == 1


def test_a_block_called_by_itself_and_hooks_on_it():
    amp = amprewrite.rewrite(net(), dtype="bf16", granularity="blocks")
    seen = []
    amp.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    x = torch.randn(2, 6, 16)
    plain = net().blocks[0](x)
    assert not torch.equal(amp.blocks[0](x), plain)
    torch.testing.assert_close(amp.blocks[0](x), plain, rtol=2e-2, atol=2e-2)
    amp(TOKENS)
    assert seen == [torch.float32] * 3
    assert len(amp.plan.regions) == 5


def test_copies_and_second_rewrites_are_cut_alike_or_not_at_all():
    amp = amprewrite.rewrite(net(), dtype="bf16", granularity="blocks")
    want = amp(TOKENS)
    buffer = io.BytesIO()
    torch.save(amp, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(amp), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(TOKENS), want)
        assert len(other.plan.regions) == 5
    whole = amprewrite.rewrite(amp, dtype="bf16")
    whole(TOKENS)
    assert len(whole.plan.regions) == 1


def test_the_strict_interpreter_follows_the_cut():
    amp = amprewrite.rewrite(net(), dtype="bf16", granularity="blocks", example_inputs=(TOKENS,))
    report = verify(amp, (TOKENS,))
    assert {row.name.partition("/")[0] for row in report.rows} == {f"graph{index}" for index in range(5)}
    assert 0 < report.output_error < 2e-2


@pytest.mark.parametrize(
    ("granularity", "says"),
    [
        ("block", "'model', 'blocks'"),
        (3, "list of module paths"),
        ([], "list of module paths"),
        (["blocks.7"], r"near it are .*blocks\.\d"),
    ],
)
def test_bad_granularities(granularity, says):
    with pytest.raises(PolicyError, match=says):
        amprewrite.rewrite(net(), granularity=granularity)


def test_a_model_without_blocks_is_told_to_name_them():
    with pytest.raises(PolicyError, match="no list of blocks"):
        amprewrite.rewrite(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), granularity="blocks")


def test_a_model_that_computes_nothing_has_an_empty_plan():
    class Sparse(nn.Module):
        def forward(self, x):
            return x.to_sparse()

    amp = amprewrite.rewrite(Sparse(), dtype="bf16")
    amp(torch.eye(2))
    assert not amp.plan.nodes


def test_many_parts_with_patched_forwards_are_captured():
    """Dynamo compiles each forward that is no Python function through code that all of a process share, up to a limit."""
    for _ in range(4):
        model = net()
        for block in model.blocks:
            block.forward = functools.partial(nn.functional.gelu)
        amp = amprewrite.rewrite(model, dtype="bf16", granularity="blocks")
        with torch._dynamo.config.patch(accumulated_recompile_limit=2):
            amp(TOKENS)
        assert not amp.plan.skipped and sum(node.op == "gelu" for node in amp.plan.nodes) == len(model.blocks)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("patched", [False, True])
def test_a_copy_of_a_part_is_the_part_before_the_rewrite(patched, how):
    model, x = net(), torch.randn(2, 6, 16)
    if patched:
        model.blocks[1].forward = functools.partial(nn.functional.gelu)
    amp = amprewrite.rewrite(model, dtype="bf16", granularity="blocks")
    amp(TOKENS)
    copied = how(amp.blocks[1])
    assert torch.equal(copied(x), model.blocks[1](x)) and copied.up.weight is not amp.blocks[1].up.weight
    again = amprewrite.rewrite(copied, dtype="bf16")
    torch.testing.assert_close(again(x), model.blocks[1](x), rtol=2e-2, atol=2e-2)
    assert again.plan.regions
