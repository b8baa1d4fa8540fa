"""What users read who set a switch elsewhere, or call a tracer through a library."""

from __future__ import annotations

import io
import types

import pytest
import torch
from runtime_help import MLP, data, low, mlp
from torch import nn

import amprewrite
from amprewrite import AmpRewriteWarning, CaptureError
from amprewrite.runtime.compiler.dynamo_failures import failure_of
from amprewrite.runtime.compiler.plain_words import plain_reason


def library(name: str, code: str) -> types.ModuleType:
    """A Python module of that name, which is not installed."""
    module = types.ModuleType(name)
    exec(code, module.__dict__)
    return module


TRAINS = "import torch\ndef train(model, x):\n    with torch.autocast('cpu', torch.bfloat16):\n        return model(x)\n"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("transformers.trainer", r"Trainer switches it on: give bf16=False and fp16=False"),
        ("trl.trainer.sft_trainer", r"TRL.*bf16=True is its default.*bf16=False"),
        ("accelerate.accelerator", r"accelerate.*mixed_precision='no'"),
        ("lightning.pytorch.plugins.precision.amp", r"Lightning.*precision='32-true'"),
        ("my.own", r"outside the autocast region\. If you wrote none.*bf16=.*mixed_precision=.*precision="),
    ],
)
def test_an_autocast_around_names_who_switched_it_on(name, says):
    amp = low(mlp())
    with pytest.raises(CaptureError, match=says):
        library(name, TRAINS).train(amp, data())


def test_the_trainer_is_named_before_what_it_uses():
    inner = library("accelerate.utils.operations", TRAINS)
    outer = library("transformers.trainer", "def train(inner, model, x):\n    return inner.train(model, x)\n")
    with pytest.raises(CaptureError, match="Trainer switches it on"):
        outer.train(inner, low(mlp()), data())


def test_a_forward_wrapped_in_autocast_says_that_nothing_is_rewritten():
    model = mlp()
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    amp = low(model)
    with pytest.warns(AmpRewriteWarning, match=r"MLP runs .* under a torch\.autocast of its own.*mixed_precision='no'"):
        amp(data())
    assert not amp.plan.casts


def test_an_autocast_around_some_ops_is_no_news():
    class Some(MLP):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                x = self.first(x)
            return self.second(x.float())

    assert low(Some())(data()).dtype == torch.float32  # a warning would be an error here


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        (lambda amp: torch.onnx.export(amp, (data(),), io.BytesIO(), dynamo=False), r"torch\.onnx\.export; use amp\.export_onnx"),
        (lambda amp: torch.fx.symbolic_trace(amp), r"symbolic_trace.*rewrite\(create_feature_extractor\(model"),
        (lambda amp: torch.jit.trace(amp, (data(),)), r"torch\.jit\.trace; use amp\.export_program\(args\)"),
        (lambda amp: torch.export.export(amp, (data(),)), r"torch\.export; use amp\.export_program\(args\)"),
    ],
)
def test_a_tracer_is_told_what_to_use(trace, says):
    with pytest.raises(CaptureError, match=says):
        trace(low(mlp()).eval())


def test_dynamos_own_words_are_put_plainly():
    assert plain_reason("Missing tp_iternext") == "it steps through an iterator that capture cannot follow"
    assert "use_orig_params=True" in plain_reason("FSDP with use_orig_params=False")
    assert plain_reason("Data-dependent branching") == "Data-dependent branching"


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = amprewrite.rewrite(mlp(), dtype="bf16")


@pytest.mark.parametrize(
    "convert",
    [
        pytest.param(lambda amp: amp.half(), id="half"),
        pytest.param(lambda amp: amp.bfloat16(), id="bfloat16"),
        pytest.param(lambda amp: amp.to(torch.bfloat16), id="to"),
        pytest.param(lambda amp: amp.second.bfloat16(), id="a part"),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_converting_a_rewritten_model_says_that_its_master_weights_are_gone(convert, dtype):
    amp, x = low(mlp(), dtype=dtype), torch.ones(3, 16)
    with pytest.warns(AmpRewriteWarning, match=r"(first|second)\.weight .* now: the fp32 master weights are gone.*amp\.float\(\)") as seen:
        for _ in range(2):
            convert(amp)
            amp.second(x.to(amp.second.weight.dtype))
    assert len([each for each in seen if each.category is AmpRewriteWarning]) == 1
    assert amp.float()(data()).dtype == torch.float32


def test_a_model_around_it_converts_it_too():
    with pytest.warns(AmpRewriteWarning, match="master weights are gone"):
        Halved().half()


def inside_dynamo(cause):
    """As Dynamo wraps an error of its own."""
    error = torch._dynamo.exc.InternalTorchDynamoError(f"{type(cause).__name__}: {cause}\n")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (inside_dynamo(NotImplementedError()), "PyTorch's capture fails on it (NotImplementedError)"),
        (inside_dynamo(KeyError("x")), "'x'"),
        (NotImplementedError(), "PyTorch's capture fails on it (NotImplementedError)"),
        (KeyError("x"), "PyTorch's capture fails on it: 'x' (KeyError)"),
        (torch._dynamo.exc.Unsupported("Uninitialized nn.Module"), "it reads a module that did not call nn.Module.__init__"),
        (torch._dynamo.exc.Unsupported("Data-dependent branching"), "Data-dependent branching"),
    ],
)
def test_a_reason_is_no_name_of_an_exception(error, says):
    """As of e3nn, whose warning ended in "NotImplementedError:"."""
    assert failure_of(error).why.startswith(says)
