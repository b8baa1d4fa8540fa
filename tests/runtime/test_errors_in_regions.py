"""An error inside a region of the model leaves the region, as in eager code: the caller's own modes are as before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import amprewrite

Region = Callable[[], Any]
REGIONS: dict[str, Region] = {
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "autocast off, no cache": lambda: torch.autocast("cpu", enabled=False, cache_enabled=False),
    "no_grad": torch.no_grad,
    "kernels of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "no hooks on saved tensors": lambda: torch.autograd.graph.disable_saved_tensors_hooks("barred here"),
    "forward mode": torch.autograd.forward_ad.dual_level,
    "inference mode": torch.inference_mode,
}


def modes() -> dict[str, Any]:
    """The modes of this thread that the regions above set."""
    nested = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    try:
        forward_mode = torch._C._enter_dual_level()
        torch._C._exit_dual_level(level=forward_mode)
    except RuntimeError:  # levels do not nest
        forward_mode = -1
    return {
        "autocast": (nested, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "kernels": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "hooks": torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        "forward mode": forward_mode,
    }


DEFAULT = modes()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Neither a test that fails nor an earlier test leaves a region open for the next: torch's older exporter does so when it fails."""
    _leave_all()
    yield
    _leave_all()


def _leave_all() -> None:
    while torch.autocast_decrement_nesting() >= 0:
        torch.clear_autocast_cache()
    torch.autocast_increment_nesting()
    torch.set_autocast_cache_enabled(True)
    torch.set_grad_enabled(True)
    torch.backends.cuda.enable_flash_sdp(True)
    torch._C._autograd._saved_tensors_hooks_enable()
    with contextlib.suppress(RuntimeError):
        torch._C._exit_dual_level(level=0)


class Looked(nn.Module):
    """A row is looked up inside a region; an index beyond the table is an error there."""

    def __init__(self, region: Region, width: int = 8, rows: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.rows, self.region = nn.Linear(width, width), nn.Embedding(rows, width), region

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        y = self.a(x)
        with self.region():
            looked = self.rows(index).detach() * 2
        out: Tensor = self.a(y) + looked.clone()
        return out


def batch(width: int = 8, rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.arange(rows)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("region", REGIONS)
def test_an_error_leaves_the_region_that_it_was_raised_in(region: str, dtype: str) -> None:
    amp, (x, index) = amprewrite.rewrite(Looked(REGIONS[region]), dtype=dtype), batch()
    for beyond in (0, 9):  # the first call of all fails, and a later one
        if not beyond:
            with pytest.raises(IndexError):
                amp(x, index + 9)
        else:
            with torch.no_grad():
                amp(x, index)
                with pytest.raises(IndexError):
                    amp(x, index + beyond)
        assert modes() == DEFAULT


class Checkpointed(Looked):
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, index, use_reentrant=False)
        return out


@pytest.mark.parametrize("region", ["autocast off", "no_grad"])
def test_an_error_leaves_a_region_inside_a_checkpoint(region: str) -> None:
    amp, (x, index) = amprewrite.rewrite(Checkpointed(REGIONS[region]), dtype="bf16"), batch()
    amp(x, index)
    with pytest.raises(IndexError):
        amp(x, index + 9)
    assert modes() == DEFAULT


class Stopped(nn.Module):
    """The recomputation of the checkpoint ends inside a region, which saves the last tensor that the backward needs."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(8, 8), reentrant

    def body(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.exp(self.linear(x)) * 2

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_leaves_the_regions_of_its_checkpoint(reentrant: bool) -> None:
    """Otherwise a later `torch.autocast` block is an inner one, which keeps its low copies of weights when it ends."""
    amp, x = amprewrite.rewrite(Stopped(reentrant), dtype="bf16"), torch.randn(4, 8, requires_grad=True)
    amp(x).sum().backward()
    assert modes() == DEFAULT


@pytest.mark.parametrize("region", ["autocast off", "no_grad"])
def test_an_error_leaves_the_region_under_torch_compile(region: str) -> None:
    x, index = batch()
    compiled = torch.compile(Looked(REGIONS[region]), backend="amprewrite")
    compiled(x, index)
    with pytest.raises(IndexError):
        compiled(x, index + 9)
    assert modes() == DEFAULT


def test_after_an_error_autocast_reads_new_weights_and_the_model_runs_low() -> None:
    """An autocast region left open kept its copies of weights for ever, and had the model run as written, in fp32."""
    model = Looked(REGIONS["autocast off"], width=1024, rows=1024)
    amp, (x, index) = amprewrite.rewrite(model, dtype="bf16"), batch(1024, 1024)
    with torch.no_grad():
        low = amp(x, index)
        with pytest.raises(IndexError):
            amp(x, index + 1)
        assert torch.equal(amp(x, index), low)
        other = nn.Linear(1024, 8)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                seen = other(x)
            expected = nn.functional.linear(x.bfloat16(), other.weight.bfloat16(), other.bias.bfloat16())
            assert torch.equal(seen, expected)
            other.weight.data.neg_()


class Mixed(nn.Module):
    """Mixes the dtypes of two values inside an autocast region of its own, in an op that PyTorch refuses them for."""

    def __init__(self, mix: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.mix = nn.Linear(8, 8), mix

    def forward(self, x: Tensor) -> Tensor:
        wide = self.linear(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.mix(self.linear(wide), wide)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "mix",
    [lambda low, wide: torch.dot(low[0], wide[0]), lambda low, wide: torch.cat([low.half(), low]), torch.complex],
    ids=["refused in capture", "three formats", "refused by the kernel"],
)
def test_mixed_dtypes_in_a_region_of_the_model_raise_pytorchs_error(mix: Callable[[Tensor, Tensor], Tensor], dtype: str) -> None:
    model, x = Mixed(mix), torch.ones(8, 8)
    with pytest.raises(RuntimeError) as expected:
        model(x)
    amp = amprewrite.rewrite(model, dtype=dtype)
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            amp(x)
        assert (type(raised.value), str(raised.value)) == (type(expected.value), str(expected.value))
    assert modes() == DEFAULT


def test_code_that_dynamo_gives_up_in_a_region_of_the_model_runs_as_the_region_says() -> None:
    model = Mixed(lambda low, wide: low.permute(*range(low.dim())[::-1]) + wide)  # Dynamo cannot trace this slice
    amp, x = amprewrite.rewrite(model, dtype="fp16"), torch.randn(8, 8)
    with pytest.warns(amprewrite.AmpRewriteWarning):  # of the code that Dynamo gave up, and of the second call, in which no graph runs
        results = amp(x), amp(x)
    for each in results:
        assert torch.allclose(each, model(x), atol=0.01)
