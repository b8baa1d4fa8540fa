"""Masks made of sizes alone: which go, which stay, and that nobody sees a difference."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.graphs.fx.ops.attention_masks import ATTENTION, MASK, Kind, argument, find_mask, kind_of, read_masks
from amprewrite.passes.apply.fold_masks import fold_mask
from amprewrite.tables.vocabulary import Edit

WIDTH = 16
Mask = Callable[[Tensor], Tensor | None]


def lengths(x: Tensor) -> tuple[int, Tensor]:
    return x.shape[1], torch.arange(x.shape[1], device=x.device)


def by_arange(x: Tensor) -> Tensor:
    """As transformers builds it."""
    _, at = lengths(x)
    return (at[None, :] <= at[:, None])[None, None].expand(x.shape[0], -1, -1, -1)


def by_triu(x: Tensor) -> Tensor:
    """As nanoGPT's ancestors did: what is blocked gets -inf."""
    n, _ = lengths(x)
    return torch.triu(torch.full((n, n), float("-inf")), diagonal=1)


def by_packed(x: Tensor) -> Tensor:
    """Causal within sequences, of which position ids tell there is one."""
    _, at = lengths(x)
    positions = at.unsqueeze(0).expand(x.shape[0], -1)
    packed = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return ((packed[:, :, None] == packed[:, None, :]) & (at[None, :] <= at[:, None]))[:, None]


def all_ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape[:2], dtype=torch.bool)[:, None, None, :]


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(1, 1, x.shape[1], x.shape[1])


def window(x: Tensor) -> Tensor:
    _, at = lengths(x)
    return (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - 3)


def slope(x: Tensor) -> Tensor:
    """ALiBi's: added, neither 0 nor blocking."""
    _, at = lengths(x)
    return -(at[None, :] - at[:, None]).abs().float()


def of_data(x: Tensor) -> Tensor:
    """Keys that are large enough, as padding masks come with the data."""
    return (x[:, None, None, :, 0] > -50).expand(-1, 1, x.shape[1], -1)


def causal_of_data(x: Tensor) -> Tensor:
    return of_data(x) & by_arange(x)


def written(x: Tensor) -> Tensor:
    n, _ = lengths(x)
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    mask[:, 0] = False
    mask[0, 0] = True
    return mask


def written_by_name(x: Tensor) -> Tensor:
    n, _ = lengths(x)
    mask = torch.zeros(n, n)
    torch.select(input=mask, dim=1, index=0).fill_(-1e4)
    return mask


def written_by_list(x: Tensor) -> Tensor:
    n, _ = lengths(x)
    mask = torch.zeros(n, n)
    torch._foreach_add_([mask.diagonal()], -1e4)
    return mask


def by_triu_in_place(x: Tensor) -> Tensor:
    n, _ = lengths(x)
    return torch.full((n, n), float("-inf")).triu_(1)


@pytest.fixture(autouse=True)
def afresh() -> None:
    """The same weights for all; and Dynamo remembers which sizes of a function changed, to take them for symbols from the start."""
    torch.manual_seed(0)
    torch._dynamo.reset()


class Attention(nn.Module):
    def __init__(self, mask: Mask, checkpointed: bool = False, positional: bool = False) -> None:
        super().__init__()
        self.mask, self.checkpointed, self.positional = mask, checkpointed, positional
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def layer(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.positional:
            found = F.scaled_dot_product_attention(q, k, v, mask, 0.0, False)
        else:
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(found.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        for _ in range(2):
            x = x + (checkpoint(self.layer, x, mask, use_reentrant=False) if self.checkpointed else self.layer(x, mask))
        return x


def noise(batch: int = 2, length: int = 6) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(length))


def notes(amp: nn.Module) -> list[str]:
    """What the plan does to masks, and how often; bodies of checkpoints are regions of their own."""
    return [f"{count} {what.value}" for what, count in Counter(e.what for region in amp.plan.regions for e in region.edits).items()]


class Seen(TorchDispatchMode):
    """(is there a mask, is_causal) of the kernels of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[bool, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.calls.append((kwargs.get("attn_mask") is not None, args[4] if len(args) > 4 else kwargs.get("is_causal", False)))
        return func(*args, **kwargs)


def check(model: Attention, inputs: list[Tensor], **options: object) -> tuple[nn.Module, list[tuple[bool, bool]]]:
    """Train on `inputs`, compare with the plain model's gradients; what attention was called with in eager graphs."""
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="bf16", **options)
    calls = []
    for x in inputs:
        model.zero_grad()
        amp.zero_grad()
        model(x).square().sum().backward()
        with Seen() as seen:
            amp(x).square().sum().backward()
        calls += seen.calls
        for p, q in zip(model.parameters(), amp.parameters(), strict=True):
            assert (p.grad - q.grad).norm() <= 0.05 * p.grad.norm()
    return amp, calls


@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("mask", [by_arange, by_triu, by_packed])
def test_causal_masks_go(mask: Mask, positional: bool) -> None:
    amp, calls = check(Attention(mask, positional=positional), [noise()])
    assert notes(amp) == ["2 drop causal mask"]
    assert calls == [(False, True)] * 2


@pytest.mark.parametrize("mask", [all_ones, zeros])
def test_masks_that_say_nothing_go(mask: Mask) -> None:
    amp, calls = check(Attention(mask), [noise()])
    assert notes(amp) == ["2 drop full mask"]
    assert calls == [(False, False)] * 2


@pytest.mark.parametrize("mask", [window, slope, written, written_by_name, written_by_list, by_triu_in_place])
def test_other_masks_stay(mask: Mask) -> None:
    amp, calls = check(Attention(mask), [noise()])
    assert notes(amp) == [] and calls == [(True, False)] * 2


def test_nothing_to_do_without_a_mask() -> None:
    amp, calls = check(Attention(lambda x: None), [noise()])
    assert notes(amp) == [] and calls == [(False, False)] * 2


def test_sizes_that_change_are_looked_up() -> None:
    """A window of three over three positions is causal, over nine it is not; each graph asks once for its two calls."""
    sizes = [noise(2, 3), noise(3, 9), noise(4, 5), noise(2, 2), noise(5, 9)]
    amp, calls = check(Attention(window), sizes)
    assert calls == [(False, True)] * 2 + [(True, False)] * 4 + [(False, True)] * 2 + [(True, False)] * 2
    said = {note for plan in amp.plans for region in plan.regions for note in region.notes if "attention" in note}
    text = "takes no mask at sizes at which its own, made of sizes alone, is causal or allows all positions"
    assert f"each of 2 attention calls {text}" in said
    assert any(f"  edit scaled_dot_product_attention {text}" in str(plan) for plan in amp.plans)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("mask", [of_data, causal_of_data])
def test_masks_of_data_are_looked_at(mask: Mask, checkpointed: bool) -> None:
    """On a CPU, in every forward; one that leaves a key out is handed on as it is."""
    causal = mask is causal_of_data
    padded = noise()
    padded[1, -1, 0] = -60.0
    amp, calls = check(Attention(mask, checkpointed), [noise(), padded, noise()])
    assert notes(amp) == ["2 look at mask"]
    assert set(calls[: len(calls) // 3] + calls[-len(calls) // 3 :]) == {(False, causal)}
    assert set(calls[len(calls) // 3 : -len(calls) // 3]) == {(True, False)}


def test_masks_of_data_stay_in_compiled_graphs() -> None:
    amp, _ = check(Attention(of_data), [noise()], backend="aot_eager")
    assert notes(amp) == []


def test_a_mask_of_data_written_between_its_readers_stays() -> None:
    class Written(Attention):
        def forward(self, x: Tensor) -> Tensor:
            mask = of_data(x).clone()
            x = self.layer(x, mask)
            mask[..., 0] = False
            return self.layer(x, mask)

    amp, calls = check(Written(of_data), [noise()])
    assert notes(amp) == [] and calls == [(True, False)] * 2


def test_compiled_graphs_keep_masks_of_changing_sizes() -> None:
    amp, _ = check(Attention(by_arange), [noise(2, 6)], backend="aot_eager")
    assert notes(amp) == ["2 drop causal mask"]
    amp, _ = check(Attention(by_arange), [noise(2, 6), noise(3, 7), noise(4, 5)], backend="aot_eager")
    assert not amp.plans[-1].regions[-1].edits
    assert len(amp.plan.regions) == len(amp.plans), "graphs with other edits are other graphs"


def test_masks_go_inside_activation_checkpoints() -> None:
    amp, calls = check(Attention(by_arange, checkpointed=True), [noise()])
    assert notes(amp) == ["2 drop causal mask"]
    assert set(calls) == {(False, True)} and len(calls) >= 2


def test_a_mask_that_an_activation_checkpoint_writes_stays() -> None:
    class Written(Attention):
        def layer(self, x: Tensor, mask: Tensor | None) -> Tensor:
            mask[..., 1:, 0] = False  # type: ignore[index]
            return super().layer(x, mask)

    def full(x: Tensor) -> Tensor:
        return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)

    model, x = Written(full, checkpointed=True), noise()
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="bf16")
    assert (amp(x) - model(x)).norm() <= 0.02 * model(x).norm()


def test_a_mask_for_other_lengths_stays() -> None:
    """More keys than queries: `is_causal` counts from the first key, a cache's mask from the last."""

    class Cached(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            _, at = lengths(x)
            mask = at[None, :] <= at[:, None]
            return self.out(F.scaled_dot_product_attention(q[:, :, -3:], k, v, mask[-3:]).transpose(1, 2).flatten(2))

    amp, calls = check(Cached(by_arange), [noise()])
    assert notes(amp) == [] and calls == [(True, False)]


def test_exports_stay_as_they_were_written() -> None:
    amp = amprewrite.rewrite(Attention(by_arange), dtype="bf16")
    exported = amp.export_program((noise(),))
    calls = [node for node in exported.graph.nodes if ATTENTION in str(node.target)]
    assert len(calls) == 2 and all(len(call.args) > 3 for call in calls)


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (torch.ones(4, 4, dtype=torch.bool), Kind.ALL),
        (torch.ones(4, 4, dtype=torch.bool).tril(), Kind.CAUSAL),
        (torch.ones(4, 4, dtype=torch.bool).triu(), Kind.OTHER),
        (torch.ones(3, 1, 4, 4, dtype=torch.bool).tril(), Kind.CAUSAL),
        (torch.ones(1, 4, dtype=torch.bool), Kind.ALL),
        (torch.full((4, 4), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16).triu(1), Kind.CAUSAL),
        (torch.full((4, 4), -1e4).triu(1), Kind.OTHER),
        (torch.full((4, 4), float("nan")), Kind.OTHER),
    ],
)
def test_kinds(mask: Tensor, kind: Kind) -> None:
    assert kind_of(mask, (4, 4)) is kind


def test_one_row_of_a_batch_that_differs_keeps_the_mask() -> None:
    mask = torch.ones(3, 1, 4, 4, dtype=torch.bool).tril()
    mask[2, 0, 3, 0] = False
    assert kind_of(mask, (4, 4)) is Kind.OTHER


def test_a_graph_by_itself() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
        at = torch.arange(size)
        return F.scaled_dot_product_attention(q, k, v, at[None, :] <= at[:, None])

    module = torch.fx.symbolic_trace(attend)
    q = torch.randn(1, 1, 5, 8)
    for node, value in zip(module.graph.find_nodes(op="placeholder"), (q, q, q, 5), strict=True):
        node.meta["example_value"] = value
    ((call, what),) = read_masks(module.graph, {}).items()
    assert what is Edit.LOOK_UP_MASK, "the size is an input, so only a lookup would do"
    fold_mask(module, argument(call, MASK), {call: what}, "masks")
    module.recompile()
    torch.testing.assert_close(module(q, q, q, 5), attend(q, q, q, 5))
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(find_mask) == 1 and operator.le not in targets
