"""The fused kernel, interpreted on the CPU, against torch; when it is used, and what a step guard may believe of it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import amprewrite
from amprewrite.graphs.fx.ops import finite_flags, fused_copy
from amprewrite.graphs.fx.ops.fused_copy import copy_many, is_plain, unscale_many
from amprewrite.graphs.fx.ops.pad_ops import pad_cast
from amprewrite.graphs.fx.weights.linked_copies import CastBlock, cast_block
from amprewrite.graphs.fx.weights.weight_cache import WeightCache
from amprewrite.runtime.training import nonfinite
from amprewrite.runtime.training.nonfinite import find_nonfinite, found_after_backward
from amprewrite.tables.errors import AmpRewriteWarning

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the triton package, which is not installed")
LOW = [torch.float16, torch.bfloat16]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The Triton kernels, interpreted, in the place of those for CUDA; `launches` lists what they were asked to do."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "amprewrite.graphs.fx.ops.triton_kernels", raising=False)
    module = importlib.import_module("amprewrite.graphs.fx.ops.triton_kernels")
    launch, launches = module.launch, []

    def recorded(table: Tensor, rows: int, longest: int, kinds: object, rank: int, aligned: bool, *rest: Tensor | None) -> None:
        launches.append((rows, rank, aligned))
        launch(table, rows, longest, kinds, rank, aligned, *rest)

    monkeypatch.setattr(module, "launch", recorded)
    monkeypatch.setattr(module, "launches", launches, raising=False)
    monkeypatch.setattr(fused_copy, "_imported", lambda: module)
    monkeypatch.setattr(fused_copy, "DEVICES", {"cpu"})
    monkeypatch.setattr(fused_copy, "ONE_PASS_FROM", 0)
    monkeypatch.setattr(fused_copy, "STRIDED_FROM", 1)
    yield module
    sys.modules.pop("amprewrite.graphs.fx.ops.triton_kernels", None)  # the next import is not interpreted
    vars(amprewrite.graphs.fx.ops).pop("triton_kernels", None)


def whole(*shape: int) -> Tensor:
    """Whole numbers that fp16 and bf16 hold, so that rounding, which the interpreter does its own way in bf16, plays no part."""
    return torch.randint(-128, 128, shape).float()


# the kernel ---------------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("sizes", [((5,),), ((1024,), (16, 64)), ((3, 7), (2048,), (1,), (0,), (5, 1, 3))], ids=str)
def test_dense_copies(kernels: ModuleType, low: torch.dtype, sizes: tuple[tuple[int, ...], ...]) -> None:
    sources = [whole(*size) for size in sizes]
    targets = [torch.full(size, 7, dtype=low) for size in sizes]
    assert fused_copy._by_kernel(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target.float())
    aligned = all(source.numel() % 16 == 0 for source in sources)
    assert [(rows, rank) for rows, rank, _ in kernels.launches] == [(sum(s.numel() > 0 for s in sources), 1)]
    assert aligned or not kernels.launches[0][2]


@needs_triton
@pytest.mark.parametrize("low", LOW, ids=str)
def test_strided_copies_write_nothing_outside(kernels: ModuleType, low: torch.dtype) -> None:
    """Logical parts of padded buffers: rows, channels of a convolution, split axes, channels last, a transpose."""
    buffers = [torch.zeros(8, 16), torch.zeros(16, 8, 3, 3), torch.zeros(3, 8, 16), torch.zeros(8, 8, 3, 3), torch.zeros(8, 6)]
    buffers = [buffer.to(low) for buffer in buffers]
    buffers[3] = buffers[3].contiguous(memory_format=torch.channels_last)
    views = [buffers[0][:5, :11], buffers[1][:9, :3], buffers[2][:, :7, :13], buffers[3][:5, :7], buffers[4].t()]
    sources = [whole(*view.shape) for view in views]
    sources[3] = sources[3].contiguous(memory_format=torch.channels_last)
    copy_many(sources, views)
    assert kernels.launches and all(rank > 1 for _, rank, _ in kernels.launches)
    for source, view, buffer in zip(sources, views, buffers, strict=True):
        assert torch.equal(source, view.float())
        assert buffer.float().abs().sum() == source.abs().sum()


@needs_triton
@pytest.mark.parametrize("scaled", [False, True], ids=["cast", "cast, scaled, checked"])
@pytest.mark.parametrize(("rank", "aligned"), [(1, True), (1, False), (2, False), (4, False)])
@pytest.mark.parametrize("architecture", [80, 90, 100], ids="sm_{}".format)
def test_it_compiles_for_gpus_that_are_not_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, architecture: int, rank: int, aligned: bool, scaled: bool
) -> None:
    """Down to machine code that keeps all in registers, few enough of them; dense and aligned it moves 16 bytes at a time."""
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from amprewrite.graphs.fx.ops import triton_kernels as made

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    low, high = (tl.float16, tl.float32) if scaled else (tl.float32, tl.bfloat16)
    fixed = {"SOURCE": low, "TARGET": high, "RANK": rank, "ALIGNED": aligned, "SCALED": scaled}
    fixed |= {"MOST": made.RANK, "WIDTH": made.WIDTH, "BLOCK": made.BLOCK} | ({} if scaled else {"factor": None, "flag": None})
    types = {"table": "*i64", "factor": "*fp32", "flag": "*fp32"} | dict.fromkeys(fixed, "constexpr")
    source = ASTSource(made._copy_rows, types, fixed, {(0,): [["tt.divisibility", 16]]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Triton's, about a default of its next release
        built = compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4})
    registers, spilled = resources(built.asm["cubin"], tmp_path)
    assert spilled == 0 and registers <= REGISTERS[rank]
    wide = re.findall(r"(ld|st)\.global\.v4\.b32", built.asm["ptx"])
    assert set(wide) == ({"ld", "st"} if aligned else set())


REGISTERS = {1: 48, 2: 96, 4: 128}
"""For each thread, at most, by rank. A multiprocessor has 65,536 for its 2,048 threads: with 128 a quarter of them run at once."""


def resources(cubin: bytes, folder: Path) -> tuple[int, int]:
    """(registers of a thread, bytes that it spills), as NVIDIA's tool reads them from machine code."""
    import triton

    (folder / "kernel.cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    told = subprocess.run([tool, "--dump-resource-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    number = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return number["REG"], number["STACK"] + number["LOCAL"]


@needs_triton
def test_more_programs_than_one_walk_a_long_tensor(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_PROGRAMS", 4)
    source, target = whole(70, 129), torch.zeros(70, 129, dtype=torch.float16)
    assert fused_copy._by_kernel([source, source[:2]], [target, torch.zeros(2, 129, dtype=torch.float16)])
    assert torch.equal(source, target.float())


@needs_triton
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("bad", [None, float("inf"), float("-inf"), float("nan")], ids=str)
def test_gradients_leave_in_one_pass(kernels: ModuleType, low: torch.dtype, bad: float | None) -> None:
    """Cast first, multiplied in fp32, and one flag for all of them."""
    gradients = [whole(33, 5).to(low), whole(2048).to(low), whole(16, 40).to(low)[:9, :33]]
    if bad is not None:
        gradients[1][1999] = bad
    made = unscale_many(gradients, torch.tensor(2.0**-20))
    assert made is not None and all(g.dtype == torch.float32 for g in made)
    for gradient, product in zip(gradients, made, strict=True):
        assert torch.equal(gradient.float() * 2.0**-20, product) or (bad is not None and product.numel() == 2048)
    (flag,), left = finite_flags.finite_flags(made)
    assert not left and flag.item() == (bad is not None)


@needs_triton
def test_a_product_that_overflows_is_flagged(kernels: ModuleType) -> None:
    made = unscale_many([torch.full((4,), 2.0**15, dtype=torch.float16)], torch.tensor(2.0**120))
    assert made is not None and made[0].isinf().all()
    assert finite_flags.finite_flags(made)[0][0].item() == 1


@needs_triton
def test_what_the_kernel_leaves_to_torch(kernels: ModuleType) -> None:
    factor = torch.tensor(0.5)
    assert unscale_many([torch.ones(4)], factor) is None, "fp32 gradients need no cast"
    assert unscale_many([torch.ones(4, dtype=torch.float16).to_sparse()], factor) is None
    assert unscale_many([], factor) is None
    many = torch.zeros(3, 2, 5, 2, 7, dtype=torch.float16).permute(4, 1, 2, 3, 0)[::2, :, ::2]
    assert not fused_copy._by_kernel([many], [torch.zeros(many.shape)]), "five dimensions that cannot be joined"
    assert not kernels.launches
    targets = [torch.zeros(2, 4, dtype=torch.float16)[:, :3], torch.zeros(3, dtype=torch.float64)]
    copy_many([whole(2, 3), whole(3)], targets)
    assert kernels.launches == [(1, 2, False)], "the strided one alone"


def test_what_is_plain() -> None:
    assert is_plain(torch.ones(3)) and is_plain(nn.Parameter(torch.ones(3)))
    assert not is_plain(torch.ones(3).to_sparse())
    seen: list[bool] = []
    torch.func.vmap(lambda x: seen.append(is_plain(x)) or x)(torch.ones(3, 2))
    torch._vmap_internals._vmap(lambda x: seen.append(is_plain(x)) or x)(torch.ones(3, 2))
    torch.func.functionalize(lambda x: seen.append(is_plain(x)) or x)(torch.ones(3))
    with torch._subclasses.FakeTensorMode():
        seen.append(is_plain(torch.ones(3)))
    assert seen == [False] * 4


# where it cannot run --------------------------------------------------------------------------------------------------------


@needs_triton
def test_a_kernel_that_cannot_compile_is_told_once(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*args: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "launch", no_compiler)
    gradients, factor = [torch.ones(4, dtype=torch.float16)], torch.tensor(0.5)
    with pytest.warns(AmpRewriteWarning, match=r"cannot run here \(RuntimeError: Failed to find C compiler\); torch does the same"):
        assert unscale_many(gradients, factor) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert unscale_many(gradients, factor) is None


def test_a_cpu_has_no_kernels() -> None:
    assert fused_copy._kernels(torch.device("cpu")) is None
    assert unscale_many([torch.ones(1 << 23, dtype=torch.float16)], torch.tensor(0.5)) is None


# what the look after a backward may believe -----------------------------------------------------------------------------------------------


def delivered(weights: list[Tensor], values: list[float]) -> Tensor:
    """Gradients of `weights`, made, vouched for and delivered by autograd; the flag they share."""
    made = [torch.full_like(w, value) for w, value in zip(weights, values, strict=True)]
    flag = torch.tensor(float(not all(g.isfinite().all() for g in made)))
    finite_flags.record_finite_flag(made, flag)
    for w, g in zip(weights, made, strict=True):
        w.grad = g.detach()  # as AccumulateGrad keeps it
    return flag


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the gradients that the guard reads from here on."""
    sizes: list[int] = []
    look = nonfinite.unscale_and_check

    def counted(gradients: list[Tensor], *rest: Tensor) -> None:
        sizes.extend(g.numel() for g in gradients)
        look(gradients, *rest)

    monkeypatch.setattr(nonfinite, "unscale_and_check", counted)
    return sizes


@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_what_was_checked_is_not_read_again_after_backward(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    weights = [nn.Parameter(torch.ones(n)) for n in (3, 5, 7)]
    delivered(weights[:2], [1.0, value])
    weights[2].grad = torch.ones(7)
    sizes = looked_at(monkeypatch)
    found = found_after_backward(weights)
    assert found is not None and bool(found) == (value != 1.0)
    assert sizes == [7]


@pytest.mark.parametrize("write", ["data", "numpy"])
def test_a_step_reads_every_gradient(monkeypatch: pytest.MonkeyPatch, write: str) -> None:
    """PyTorch does not count these writes, so nothing that was known before says that the gradient is finite."""
    w = nn.Parameter(torch.ones(3))
    delivered([w], [1.0])
    assert w.grad is not None
    (w.grad.data if write == "data" else w.grad.numpy())[1] = float("inf")
    sizes = looked_at(monkeypatch)
    found = find_nonfinite([w])
    assert found is not None and bool(found) and sizes == [3]


CHANGES = {
    "clipped": lambda w: torch.nn.utils.clip_grad_norm_([w], 0.1),
    "multiplied": lambda w: w.grad.mul_(2),
    "accumulated": lambda w: (w * torch.ones(3)).sum().backward(),
    "replaced": lambda w: setattr(w, "grad", torch.ones(3)),
    "a copy": lambda w: setattr(w, "grad", w.grad.clone()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_read(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    w = nn.Parameter(torch.ones(3))
    delivered([w], [1.0])
    CHANGES[change](w)
    w.grad[1] = torch.nan  # type: ignore[index]
    sizes = looked_at(monkeypatch)
    found = found_after_backward([w])
    assert found is not None and bool(found) and sizes == [3]


def test_a_flag_speaks_for_what_was_added_to_another_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An overflow of this backward counts, wherever its gradient went; what holds it now is read besides."""
    weights = [nn.Parameter(torch.ones(n)) for n in (3, 5)]
    delivered(weights, [1.0, float("inf")])
    weights[1].grad = torch.ones(5)
    sizes = looked_at(monkeypatch)
    found = found_after_backward(weights)
    assert found is not None and bool(found) and sizes == [5]


def test_nothing_is_kept_alive_and_addresses_are_not_mistaken() -> None:
    flags: list[weakref.ref[Tensor]] = []

    class Vouched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.sum()

        @staticmethod
        def backward(ctx, gradient):
            made, flag = torch.ones(1000), torch.zeros(())
            finite_flags.record_finite_flag([made], flag)
            flags.append(weakref.ref(flag))
            return made

    w = nn.Parameter(torch.ones(1000))
    for _ in range(20):
        w.grad = None
        Vouched.apply(w).backward()
    assert w.grad is not None and finite_flags.finite_flags([w.grad]) == ([flags[-1]()], [])
    w.grad = None
    assert sum(flag() is not None for flag in flags) == finite_flags._LATEST, "what is kept does not grow with the steps"
    entries = [entry for made in finite_flags._MADE.values() for entry in made.values()]
    assert all(storage.expired() for storage, _, _ in entries)
    fresh = [torch.ones(1000) for _ in range(20)]  # the allocator gives old memory out again
    assert finite_flags.finite_flags(fresh) == ([], fresh)


# together ---------------------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("pad", ["never", "always"])
def test_training_is_the_same_with_the_kernel(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, pad: str) -> None:
    """fp16, loss scaling, an overflow on the way; big weights in batches, as on an accelerator."""
    curves = []
    for fused in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if not fused:
                patch.setattr(fused_copy, "DEVICES", set())
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(9, 30), nn.GELU(), nn.Linear(30, 30), nn.LayerNorm(30), nn.Linear(30, 3))
            amp = amprewrite.rewrite(model, dtype="fp16", pad=pad)
            optimizer = torch.optim.AdamW(amp.parameters(), lr=1e-2)
            amp.attach(optimizer)
            losses = []
            for step in range(6):
                optimizer.zero_grad()
                loss = amp(torch.randn(8, 9, generator=torch.Generator().manual_seed(step))).square().mean()
                (loss * (1e9 if step == 2 else 1.0)).backward()
                optimizer.step()
                losses.append(loss.item())
            curves.append((losses, amp.loss_scale.value, [p.detach().clone() for p in amp.parameters()]))
    (plain, scale, weights), (losses, fused_scale, fused_weights) = curves
    assert losses == plain and scale == fused_scale < 65536
    assert all(torch.equal(a, b) for a, b in zip(weights, fused_weights, strict=True))
    assert len(kernels.launches) >= 6


@needs_triton
def test_padded_weights_are_written_in_one_launch(kernels: ModuleType) -> None:
    weights = [whole(5, 11).requires_grad_(), whole(7).requires_grad_(), whole(7, 5).requires_grad_()]
    layouts = [((0, ((5, 8),)), (1, ((11, 16),))), ((0, ((7, 8),)),), ((0, ((7, 8),)), (1, ((5, 8),)))]
    made = cast_block(CastBlock([torch.float16] * 3, layouts, WeightCache()), torch.tensor(0.25), *weights)
    assert kernels.launches == [(2, 2, False)], "the one in a row is torch's"
    for w, copy, layout in zip(weights, made, layouts, strict=True):
        assert torch.equal(copy, pad_cast(w, torch.float16, layout))
    gradients = [whole(*copy.shape).half() for copy in made]
    torch.autograd.backward(made, gradients)
    for w, gradient in zip(weights, gradients, strict=True):
        assert torch.equal(w.grad, gradient[tuple(slice(0, n) for n in w.shape)].float() * 0.25)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to run Triton's kernel on")
@pytest.mark.parametrize("low", LOW, ids=str)
def test_on_cuda(low: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel gives what torch gives, bit for bit, aligned or not, and flags infinities."""
    monkeypatch.setattr(fused_copy, "ONE_PASS_FROM", 0)
    monkeypatch.setattr(fused_copy, "STRIDED_FROM", 1)
    buffers = [torch.zeros(n, n + 8, device="cuda", dtype=low) for n in (64, 520, 1000)]
    views = [buffer[: n - 1, : n - 3] for n, buffer in zip((64, 520, 1000), buffers, strict=True)]
    sources = [torch.randn(view.shape, device="cuda") for view in views]
    assert fused_copy._by_kernel(sources, views)
    for source, view, buffer in zip(sources, views, buffers, strict=True):
        assert torch.equal(source.to(low), view) and torch.count_nonzero(buffer) == torch.count_nonzero(view)
    for sizes in ((4096, 512), (4095, 511)):
        gradients = [torch.randn(n, n, device="cuda").to(low) for n in sizes]
        factor = torch.tensor(2.0**-16, device="cuda")
        made = unscale_many(gradients, factor)
        assert made is not None and all(torch.equal(g.float() * factor, m) for g, m in zip(gradients, made, strict=True))
        assert finite_flags.finite_flags(made)[0][0].item() == 0
        gradients[1][-1, -1] = torch.inf
        made = unscale_many(gradients, factor)
        assert made is not None and finite_flags.finite_flags(made)[0][0].item() == 1
