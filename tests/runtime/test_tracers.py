"""Compilers and exporters that want a rewritten model in one graph, frozen or not, and forward-mode derivatives through it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from runtime_help import Broken, data, low, mlp, ran_low
from torch import Tensor, nn

from amprewrite import AmpRewriteWarning, CaptureError
from amprewrite.graphs.fx.weights.frozen_weight import FrozenWeight

WHOLE = r"\Aa rewritten model \(MLP\) cannot be part of one graph of torch\.compile\(fullgraph=True\).*backend='inductor' to amprewrite"
EXPORT = r"\Aa rewritten model cannot be traced by torch\.export; use amp\.export_program\(args\)"


class Around(nn.Module):
    """A model with a rewritten one in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * 2).relu() + 1


def frozen() -> nn.Module:
    amp = low(mlp().eval())
    amp.freeze(data())
    return amp


# -- one graph ------------------------------------------------------------------------------------
def compile_itself(amp: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = torch.compile(amp, backend="eager", fullgraph=True)(x)
    return result


def compile_around(amp: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = torch.compile(Around(amp), backend="eager", fullgraph=True)(x)
    return result


def compile_in_place(amp: nn.Module, x: Tensor) -> Tensor:
    module = Around(amp)
    module.compile(backend="eager", fullgraph=True)
    result: Tensor = module(x)
    return result


@pytest.mark.parametrize("compiled", [compile_itself, compile_around, compile_in_place])
@pytest.mark.parametrize("make", [lambda: low(mlp()), frozen], ids=["plain", "frozen"])
def test_fullgraph_is_refused_and_points_to_backend(make: Callable[[], nn.Module], compiled: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()  # it runs code again that it read for another call with the same backend, whole or not
    amp, x = make(), data()
    for _ in range(2):
        with pytest.raises(CaptureError, match=WHOLE) as caught:
            compiled(amp, x)
    assert isinstance(caught.value, torch._dynamo.exc.Unsupported)
    with torch.no_grad():
        assert ran_low(amp(x), mlp()(x))


def test_a_compiler_that_may_break_its_graph_runs_the_model_rewritten() -> None:
    amp, x = low(mlp()), data()
    for model, plain in ((amp, mlp()), (Around(amp), Around(mlp()))):
        assert ran_low(torch.compile(model, backend="eager")(x), plain(x))


def test_graph_breaks_that_are_errors_are_refused_too() -> None:
    torch._dynamo.reset()
    amp, x = low(mlp()), data()
    with pytest.raises(CaptureError, match=WHOLE), torch._dynamo.error_on_graph_break(True):
        torch.compile(Around(amp), backend="eager")(x)
    assert ran_low(torch.compile(Around(amp), backend="eager")(x), Around(mlp())(x))


def test_a_model_within_a_strict_one_is_no_outer_compiler() -> None:
    x = data()
    assert ran_low(low(Around(mlp()), strict=True)(x), Around(mlp())(x))


# -- exporters ------------------------------------------------------------------------------------
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("make", [lambda: low(mlp()), frozen], ids=["plain", "frozen"])
def test_torch_export_is_refused_alike(make: Callable[[], nn.Module], around: bool, strict: bool) -> None:
    amp, x = make(), data()
    with pytest.raises(CaptureError, match=EXPORT):
        torch.export.export(Around(amp) if around else amp, (x,), strict=strict)
    with torch.no_grad():
        assert torch.equal(amp.export_program((x,)).module()(x), amp(x))


@pytest.mark.parametrize("make", [lambda: low(mlp()), frozen], ids=["plain", "frozen"])
def test_torch_onnx_export_says_what_to_call(make: Callable[[], nn.Module]) -> None:
    pytest.importorskip("onnxscript")
    with pytest.raises(Exception, match=r"traced by torch\.onnx\.export; use amp\.export_onnx\(path, args\)") as caught:
        torch.onnx.export(make(), (data(),), dynamo=True, verbose=False)
    assert isinstance(caught.value.__cause__, CaptureError)


@pytest.mark.parametrize("strict", [True, False])
def test_a_program_that_reads_a_frozen_weight_has_its_values(strict: bool) -> None:
    class Reads(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.inner.first.weight)

    amp, x = frozen(), data()
    weight = amp.first.weight
    assert isinstance(weight, FrozenWeight)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Reads(amp), (x,), strict=strict)
        assert torch.equal(program.module()(x), nn.functional.linear(x, weight.thawed()))


def test_a_frozen_weight_has_a_fake_of_its_fp32_tensor() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    weight = frozen().first.weight
    held = weight.untyped_storage().nbytes()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(weight)
    assert (fake.dtype, fake.shape, fake.device) == (torch.float32, weight.shape, weight.device)
    assert held == weight.numel() * 2 == weight.untyped_storage().nbytes()


# -- forward-mode derivatives ---------------------------------------------------------------------
def of_input(model: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))


def of_parameters(model: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(each.detach(), torch.ones_like(each)) for name, each in model.named_parameters()}
        return forward_ad.unpack_dual(torch.func.functional_call(model, duals, (x,)))


def of_one_weight(model: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        layer, kept = model[0], model[0].weight
        del layer.weight
        layer.weight = forward_ad.make_dual(kept.detach(), torch.ones_like(kept))
        try:
            return forward_ad.unpack_dual(model(x))
        finally:
            del layer.weight
            layer.weight = kept


def behind(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(16, 4)).eval()


NORMS = {"none": nn.Identity, "layer": lambda: nn.LayerNorm(16), "batch": lambda: nn.BatchNorm1d(16), "group": lambda: nn.GroupNorm(2, 16)}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("derivative", [of_input, of_parameters, of_one_weight])
@pytest.mark.parametrize("norm", NORMS)
def test_forward_mode_runs_fp32_and_says_so_once(norm: str, derivative: Callable[..., Any], grad: bool) -> None:
    model, x = behind(NORMS[norm]()), data()
    amp = low(model)
    with torch.set_grad_enabled(grad):
        want = derivative(model, x)
        with pytest.warns(AmpRewriteWarning, match=r"Sequential ran in fp32: forward-mode derivatives.*original"):
            got = derivative(amp, x)
        assert torch.equal(got.primal, want.primal) and torch.equal(got.tangent, want.tangent)
        assert ran_low(amp(x), model(x))  # outside of the level it runs low
        again = derivative(amp, x)  # no word is said twice: a warning would be an error
    assert torch.equal(again.tangent, want.tangent)
    assert [part.where for part in amp.plan.skipped] == ["the model"]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "fp16", "loss_scale": 1024.0, "pad": "always"}, {"backend": "aot_eager"}, {"granularity": ["0", "2"]},
        {"cache_weights": "step"},
    ],
    ids=str,
)
@pytest.mark.parametrize("called", [True, False])
def test_forward_mode_with_options(options: dict[str, Any], called: bool) -> None:
    model, x = behind(nn.GroupNorm(2, 16)), data()
    amp = low(model, **options)
    if called:
        amp(x)
    with pytest.warns(AmpRewriteWarning, match="forward-mode"):
        got = of_input(amp, x)
    assert torch.equal(got.tangent, of_input(model, x).tangent)


def test_forward_mode_of_a_model_in_parts_and_under_strict() -> None:
    torch.manual_seed(0)
    model, x = Broken(), data()
    with pytest.warns(AmpRewriteWarning, match="forward-mode"):
        got = of_input(low(model), x)
    assert torch.equal(got.tangent, of_input(model, x).tangent)
    with pytest.raises(CaptureError, match=r"forward-mode derivatives.*inside dual_level\(\) call the original"):
        of_input(low(mlp(), strict=True), x)


def test_forward_mode_of_a_frozen_model_reads_what_is_stored() -> None:
    amp, x = frozen(), data()
    plain = mlp().eval()
    with torch.no_grad():
        for name, each in amp.named_parameters():
            plain.get_parameter(name).copy_(each.thawed() if isinstance(each, FrozenWeight) else each)
    with pytest.warns(AmpRewriteWarning):
        got = of_input(amp, x)
    assert torch.equal(got.tangent, of_input(plain, x).tangent)
