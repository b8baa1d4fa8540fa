"""Kernels of a GPU with fp8 units: what they are given, checked by torch's own rules for CUDA, and what happens where one fails."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiers import long_beyond, long_unless
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import amprewrite
from amprewrite.graphs.fx.ops import fp8_units, quantised_products
from amprewrite.graphs.fx.ops.quantised_products import Scaled, multiply, quantise, quantised_product
from amprewrite.tables.devices import device_row
from amprewrite.tables.errors import AmpRewriteWarning, PolicyError
from amprewrite.tables.formats import E4M3, PRESETS, RECIPES
from amprewrite.torch_internals.dispatch import is_plain

BF16 = torch.bfloat16
RECIPE = pytest.mark.parametrize("recipe", RECIPES)
ASKED = ["fp8", "fp8-safe", "fp8-rowwise"]
PRESET = pytest.mark.parametrize("preset", ASKED)


def on_cuda(tensor: Tensor | None) -> Tensor | None:
    """A CUDA tensor without memory, laid out in the same way."""
    return None if tensor is None else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


def checked(left: Tensor, right: Tensor, ours: Tensor, theirs: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """Stands in for `_scaled_mm`: torch checks the rules of CUDA on fake tensors, and the product is computed in fp32."""
    calls.append((left.shape[0], left.shape[1], right.shape[1]))
    with FakeTensorMode():
        wanted = torch._scaled_mm(*(on_cuda(each) for each in (left, right, ours, theirs, bias)), **options)
    assert bias is None or (bias.is_contiguous() and bias.shape == (right.shape[1],) and bias.dtype == options["out_dtype"])
    assert {left.dtype, right.dtype} != {torch.float8_e5m2}, "CUDA multiplies no e5m2 by e5m2"
    product = (left.float() @ right.float() * ours * theirs).to(options["out_dtype"])
    assert wanted.shape == product.shape and wanted.dtype == product.dtype
    return product if bias is None else product + bias


calls: list[tuple[int, int, int]] = []


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., Tensor]], None]]:
    """Let a CPU take the code path of a GPU with fp8 units. Yield a function that sets their kernel, which is `checked` at first."""

    def install(kernel: Callable[..., Tensor]) -> None:
        monkeypatch.setattr(fp8_units, "scaled_mm", kernel)

    for module in (fp8_units, quantised_products):
        monkeypatch.setattr(module, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(fp8_units, "_failed", {("casts", torch.device("cpu"))})
    install(checked)
    calls.clear()
    trials = (fp8_units.fails_on, fp8_units.makes_copies)
    yield install
    for trial in trials:
        trial.cache_clear()


def step(x: Tensor, w: Tensor, bias: Tensor | None, recipe: str, transposed: bool = False) -> list[Tensor]:
    """Return the result of a product, and the gradients of `x` and `w`."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    gemms = RECIPES[recipe].gemms
    x8, w8 = quantise(x, "x", recipe, gemms), quantise(w, "w", recipe, gemms, transposed)
    y = quantised_product(x, w, bias, x8, w8, recipe, gemms, transposed)
    return [y.detach(), *torch.autograd.grad(y, (x, w), torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))]


def close(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype and (a - b).norm() <= 0.01 * b.norm()


def few(rows: int) -> Tensor:
    return torch.randn(rows, 32, dtype=BF16)


LAYOUTS = {
    "as it is": few(48),
    "no rows": few(0),
    "one row": few(1),
    "one row that is a column": torch.randn(32, 1, dtype=BF16).t(),
    "odd rows": few(33),
    "three dims, one token": few(1)[None],
    "transposed": torch.randn(32, 33, dtype=BF16).t(),
    "every second": torch.randn(33, 64, dtype=BF16)[:, ::2],
    "expanded": few(1).expand(7, 32),
}


@RECIPE
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_layout_is_brought_into_the_one_that_cuda_takes(recipe: str, layout: str, transposed: bool, units: Any) -> None:
    x, bias = LAYOUTS[layout], torch.randn(96, dtype=BF16)[::2]
    w = torch.randn(32, 48, dtype=BF16)
    found = step(x, w if transposed else w.t(), bias, recipe, transposed)
    assert len(calls) == len(RECIPES[recipe].gemms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised_products, "multiplies_fp8", lambda device: False)
        close(found, step(x, w if transposed else w.t(), bias, recipe, transposed))


@RECIPE
def test_the_kernels_are_given_a_weight_as_it_lies_if_a_product_transposes_it(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels read contiguous matrices. torch computes only the amax of columns."""
    given: list[bool] = []
    monkeypatch.setattr(quantised_products, "by_kernel", lambda matrix, use: given.append(matrix.is_contiguous()))
    w, gemms = torch.randn(32, 48, dtype=BF16), RECIPES[recipe].gemms
    quantise(w, "w", recipe, gemms)
    plain = len(given)
    quantise(w, "w", recipe, gemms, transposed=True)
    assert all(given) and len(given) >= 2 * plain - 1 > 1


def test_a_bias_of_one_number_is_that_of_every_column(units: Any) -> None:
    """As in torch.addmm. The kernel reads as many numbers as there are columns."""
    a = Scaled(torch.ones(16, 32).to(E4M3.dtype), torch.tensor(1.0))
    made = multiply(a, a, BF16, True, torch.full((1,), 2.0, dtype=BF16))
    assert torch.equal(made, torch.full((16, 16), 34.0, dtype=BF16)) and calls == [(16, 32, 16)]


def test_a_gpu_is_given_row_major_and_column_major_whatever_the_strides_of_one_row_are(units: Any) -> None:
    row = torch.ones(32, 1).t().to(E4M3.dtype)
    assert row.stride() == (1, 1) and row.is_contiguous()
    multiply(Scaled(row, torch.tensor(1.0)), Scaled(torch.ones(16, 32).to(E4M3.dtype), torch.tensor(1.0)), BF16, False)
    assert calls == [(1, 32, 16)]


# nets -----------------------------------------------------------------------------------------------------------------------


def net_of(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    ids = torch.arange(22).reshape(2, 11)
    shared = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 1, "num_attention_heads": 4}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name in ("llama", "one token"):
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=80, num_key_value_heads=2, **shared))
        return llama, {"input_ids": ids if name == "llama" else ids[:1, :1], "use_cache": False}
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig(vocab_size=80, **shared, **still)), {"input_ids": ids}
    if name == "vit":
        vit = transformers.ViTConfig(image_size=48, patch_size=16, **shared, **still)
        return transformers.ViTModel(vit), {"pixel_values": torch.randn(1, 3, 48, 48)}
    odd = torch.nn.Sequential(torch.nn.Linear(48, 80), torch.nn.GELU(), torch.nn.Linear(80, 112), torch.nn.Linear(112, 10))
    return odd, {"input": torch.randn(5, 48)}


def result(net: torch.nn.Module, given: dict[str, Any]) -> Tensor:
    made = net(**given)
    return made if isinstance(made, Tensor) else torch.cat([each.flatten() for each in made.values()])


@pytest.mark.parametrize(
    ("net", "preset"),
    long_unless(
        lambda case: case[0] == "odd sizes" or case == ("llama", "fp8"),
        itertools.product(["llama", "odd sizes", "one token", "bert", "vit"], ASKED),
    ),
)
def test_a_step_of_a_net_gives_kernels_what_cuda_takes_and_runs_as_many_as_the_plan_has(net: str, preset: str, units: Any) -> None:
    model, given = net_of(net)
    amp = amprewrite.rewrite(model, dtype="bf16", products={"preset": preset, "module:*": "fp8"})
    plain = amprewrite.rewrite(model, dtype="bf16")
    result(amp, given)  # captures
    calls.clear()
    found = result(amp, given)
    found.square().mean().backward()
    taken = [gemm for region in amp.plan.regions for product in region.quantised.products for gemm in product.gemms if gemm.fp8]
    assert len(calls) == len(taken) > 0
    assert (found - result(plain, given)).norm() < 0.2 * found.norm()


# what fails -----------------------------------------------------------------------------------------------------------------


def unsupported(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic\nand more")


def twice(*args: Any, **kwargs: Any) -> Tensor:
    return checked(*args, **kwargs) * 2


@RECIPE
@pytest.mark.filterwarnings("ignore:an fp8 product")
def test_a_product_that_cannot_be_launched_is_made_by_bf16_units(recipe: str, units: Any) -> None:
    x, w, bias = few(33), torch.randn(48, 32, dtype=BF16), torch.randn(48, dtype=BF16)
    wanted = step(x, w, bias, recipe)
    units(unsupported)
    close(step(x, w, bias, recipe), wanted)


def test_a_failure_is_told_once_and_not_tried_again(units: Any) -> None:
    tries = []

    def fails(*args: Any, **kwargs: Any) -> Tensor:
        tries.append(1)
        return unsupported()

    units(fails)
    a = Scaled(torch.ones(16, 32).to(E4M3.dtype), torch.tensor(1.0))
    with pytest.warns(AmpRewriteWarning, match=r"16 x 32 x 16 cannot run here \(RuntimeError: CUBLAS_.*Heuristic\); bf16 units"):
        assert torch.equal(multiply(a, a, BF16, True), torch.full((16, 16), 32.0, dtype=BF16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        multiply(a, a, BF16, True)
    assert len(tries) == 1


def test_memory_that_runs_out_is_no_failure_of_a_kernel(units: Any) -> None:
    def full(*args: Any, **kwargs: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    units(full)
    a = Scaled(torch.ones(16, 32).to(E4M3.dtype), torch.tensor(1.0))
    with pytest.raises(torch.OutOfMemoryError):
        multiply(a, a, BF16, True)
    assert fp8_units._failed == {("casts", torch.device("cpu"))}


def test_a_kernel_that_makes_no_copies_leaves_them_to_torch(units: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton has no driver for a CPU: a real failure of the real kernel."""
    pytest.importorskip("triton")
    x, w = few(33), torch.randn(48, 32, dtype=BF16)
    wanted = step(x, w, None, "tensorwise")
    monkeypatch.setattr(fp8_units, "_failed", set())
    with pytest.warns(AmpRewriteWarning, match="the kernel that makes fp8 copies cannot run here") as told:
        found = step(x, w, None, "tensorwise")
    assert len(told) == 1 and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("backend", long_beyond(1, ["aot_eager", "inductor"]))
def test_a_compiled_graph_catches_what_fails_as_it_runs(backend: str, units: Any) -> None:
    net, x = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.Linear(48, 32)), torch.randn(33, 32)
    found = []

    def fails(left: Tensor, *args: Any, **options: Any) -> Tensor:
        """Fail when the graph runs. Tracing, on fake tensors, finds nothing wrong."""
        return unsupported() if is_plain(left) else left.new_empty((left.shape[0], args[0].shape[1]), dtype=options["out_dtype"])

    for kernel in (checked, fails):
        units(kernel)
        fp8_units.fails_on.cache_clear()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fp8_units, "fails_on", lambda device, recipe: "")
                amp = amprewrite.rewrite(net, dtype="bf16", products="fp8-all", backend=backend)
                y = amp(x)
                found.append([y.detach(), *torch.autograd.grad(y.square().mean(), list(amp.parameters()))])
        assert any("cannot run here" in str(each.message) for each in told) == (kernel is fails)
        assert (len(calls) > 0) == (kernel is checked)
        calls.clear()
    close(found[1], found[0])


@PRESET
def test_a_gpu_whose_first_product_fails_runs_in_bf16_and_the_plan_says_so(preset: str, units: Any) -> None:
    net, x = torch.nn.Sequential(torch.nn.Linear(32, 48)), torch.randn(33, 32)
    for kernel, why in ((unsupported, "RuntimeError: CUBLAS"), (twice, "a sum of 64 ones is 128.0")):
        units(kernel)
        fp8_units.fails_on.cache_clear()
        amp = amprewrite.rewrite(net, dtype="bf16", products={"preset": preset, "module:*": "fp8"}, example_inputs=(x,))
        assert f"a first product failed (out: {why}" in str(amp.plan)
        assert torch.equal(amp(x), amprewrite.rewrite(net, dtype="bf16")(x))


@PRESET
def test_the_first_products_are_those_of_the_recipe(preset: str, units: Any) -> None:
    assert fp8_units.fails_on(torch.device("cpu"), PRESETS[preset].recipe) == ""
    assert len(calls) == len(PRESETS[preset].recipe.gemms)


@PRESET
def test_the_first_products_have_fp32_scales_whatever_the_default_dtype_is(preset: str, units: Any) -> None:
    torch.set_default_dtype(BF16)
    try:
        assert fp8_units.fails_on(torch.device("cpu"), PRESETS[preset].recipe) == ""
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("works", [True, False])
def test_the_kernels_are_tried_while_a_graph_is_compiled(works: bool, units: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made while Dynamo captures a graph, and from torch 2.13 on all of Dynamo's work counts as compilation."""

    class Kernels:
        scale_of = staticmethod(lambda matrix, *rest: torch.tensor(256.0))
        cast_both = staticmethod(lambda matrix, scale, dtype, *ways: (matrix.to(dtype), matrix.t().to(dtype)))
        cast_rows = staticmethod(lambda matrix, dtype, *rest: ((matrix if works else 2 * matrix).to(dtype), torch.ones(len(matrix), 1)))

    monkeypatch.setattr(fp8_units, "_failed", set())
    monkeypatch.setattr(fp8_units, "_imported", lambda: Kernels)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    with contextlib.nullcontext() if works else pytest.warns(AmpRewriteWarning, match="gives wrong ones"):
        assert fp8_units.makes_copies(torch.device("cpu")) == works


@pytest.mark.parametrize("works", long_beyond(1, [False, True]))
def test_copies_that_no_kernel_makes_are_priced_as_torch_makes_them(works: bool, units: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if works:
        monkeypatch.setattr(fp8_units, "makes_copies", lambda device: True)
    net, x = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.Linear(4096, 8)), torch.zeros(16384, 4096, requires_grad=True)
    with contextlib.nullcontext() if works else pytest.raises(PolicyError, match="its copies would cost more"):
        plan = amprewrite.plan(net, (x,), dtype="bf16", products="fp8", device="h100")
        assert any(plan.regions[0].quantised.chosen) and "many passes" not in str(plan)


@pytest.mark.parametrize(("capability", "fp8"), [((8, 6), False), ((8, 7), False), ((8, 9), True)])
def test_an_unknown_gpu_has_fp8_only_from_sm_89(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fp8: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert bool(device_row("cuda").fp8) is fp8
