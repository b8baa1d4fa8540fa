"""Gradients that a kernel, or an op that reads one value often, adds up term by term: no worse than under torch.autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite
from amprewrite.tables.vocabulary import Colour, Reason

FLOOR = {"bf16": 1e-2, "fp16": 2e-3}
ROWS = 2048


class Normed(nn.Module):
    """Residual blocks with norms, whose weights get a term from every row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 100)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.ups, self.downs = (nn.ModuleList(nn.Linear(*sizes) for _ in range(3)) for sizes in ((64, 128), (128, 64)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return F.cross_entropy(self.last(x), torch.arange(len(x)) % 100)


class Picked(nn.Module):
    """A table of eight rows, which is read in some way by all rows of a batch."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.read, self.table = read, nn.Parameter(torch.randn(8, 64))
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x)) % 8
        return self.last(torch.cat([self.read(self.table, places), self.first(x)])).square().mean()


PICKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an index": lambda table, places: table[places],
    "an index among others": lambda table, places: table[places, :64],
    "a method": lambda table, places: torch.ops.aten.index.Tensor(table, [places]),
    "a lookup": lambda table, places: F.embedding(places, table),
    "a bag": lambda table, places: F.embedding_bag(places.view(-1, 4), table, mode="sum"),
    "copies": lambda table, places: torch.cat([table] * (len(places) // 8)),
    "a stack": lambda table, places: torch.stack([table[0]] * len(places)),
}


class Framed(nn.Module):
    """What a product made gets a frame of what lies on its edge: a corner gets the gradients of all that repeats it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 9), nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        framed = F.pad(self.first(x).view(-1, 1, 3, 3), (15, 15, 15, 15), mode="replicate")
        return self.last(framed).sum(1).mean()


class Windowed(nn.Module):
    """What a gain holds in fp32 under torch.autocast, read in windows that overlap: an element gets a gradient from every window."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read
        self.first, self.gain, self.last = nn.Linear(64, 64), nn.Parameter(torch.randn(64)), nn.Conv2d(1, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.read((self.first(x[:512]) * self.gain).unflatten(1, (1, 8, 8)))).sin().mean()


WINDOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "averages": lambda image: F.avg_pool2d(image, 5, 1, 2),
    "maxima": lambda image: F.max_pool2d(image, 5, 1, 2),
    "a larger image": lambda image: F.adaptive_avg_pool2d(image, 30),
    "windows": lambda image: image.flatten(2).unfold(2, 32, 1),
    "patches": lambda image: F.unfold(image, 5, padding=2)[:, None],
    "patches, added up": lambda image: F.fold(F.unfold(image, 5, padding=2), 8, 5, padding=2),
    "chosen columns": lambda image: image.index_select(3, torch.arange(100) % 3),
}
NETS: dict[str, Callable[[], nn.Module]] = {
    "a norm": Normed,
    "a frame": Framed,
    **{name: lambda read=read: Picked(read) for name, read in PICKED.items()},
    **{name: lambda read=read: Windowed(read) for name, read in WINDOWED.items()},
}


def gradients(loss: Callable[[Tensor], Tensor], net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    loss(x).backward()
    return {name: weight.grad.clone() for name, weight in net.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NETS)
def test_sums_of_gradients_are_as_exact_as_under_autocast(name: str, dtype: str) -> None:
    torch.manual_seed(0)
    net, x = NETS[name](), torch.randn(ROWS, 64)
    scale = 1024.0 if dtype == "fp16" else 1.0

    def under_autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]):
            return net(x) * scale

    want, theirs = gradients(net, net, x), gradients(under_autocast, net, x)
    ours = gradients(amprewrite.rewrite(net, dtype=dtype, **({"loss_scale": scale} if dtype == "fp16" else {})), net, x)
    assert want.keys() == ours.keys()
    for weight, value in want.items():
        bound = max(2 * float((theirs[weight] / scale - value).norm() / value.norm()), FLOOR[dtype])
        assert float((ours[weight] - value).norm() / value.norm()) <= bound, weight


def reasons(net: nn.Module, x: Tensor, **options: object) -> dict[str, tuple[Colour, Reason]]:
    return {node.op: (node.colour, node.reason) for node in amprewrite.plan(net, (x,), dtype="bf16", **options).nodes}


@pytest.mark.parametrize(("stride", "colour"), [(1, Colour.HIGH), (2, Colour.LOW), (3, Colour.LOW)])
def test_windows_that_hardly_overlap_run_low(stride: int, colour: Colour) -> None:
    net = Windowed(lambda image: F.avg_pool2d(image, 3, stride, 1))
    assert reasons(net, torch.randn(ROWS, 64))["avg_pool2d"][0] is colour


def test_a_norm_stays_low_where_its_weights_are_not_trained() -> None:
    net = Normed()
    assert reasons(net, torch.randn(ROWS, 64))["layer_norm"] == (Colour.HIGH, Reason.LOW_BACKWARD)
    net.norms.requires_grad_(requires_grad=False)
    assert reasons(net, torch.randn(ROWS, 64))["layer_norm"][0] is Colour.LOW


@pytest.mark.parametrize("lists", ["o2", "o3", "tf", "autocast"])
def test_all_lists_heed_what_a_kernel_loses(lists: str) -> None:
    assert reasons(Normed(), torch.randn(ROWS, 64), lists=lists)["layer_norm"][0] is Colour.HIGH


def test_an_override_is_followed() -> None:
    assert reasons(Normed(), torch.randn(ROWS, 64), overrides={"layer_norm": "allow"})["layer_norm"][0] is Colour.LOW


def test_what_products_made_is_gathered_low() -> None:
    """torch.autocast adds those gradients up low, too."""

    class Gathered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)[torch.arange(len(x)) % 8])

    assert reasons(Gathered(), torch.randn(ROWS, 64))["getitem"][0] is Colour.LOW


@pytest.mark.parametrize("size", [8, (8, 8)])
def test_patches_that_share_no_element_run_low(size: int | tuple[int, int]) -> None:
    """Each element is in one patch, so no gradient is added up, however the size is written."""
    torch.manual_seed(0)
    amp = amprewrite.rewrite(Windowed(lambda image: F.unfold(image, size, stride=size)[:, None]), dtype="bf16")
    amp(torch.randn(ROWS, 64))
    assert [node.colour.value for node in amp.plan.nodes if node.op == "unfold"] == ["low"]
