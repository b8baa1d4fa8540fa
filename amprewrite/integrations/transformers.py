"""Support for transformers: a `quantization_config` for `from_pretrained`, and a callback for the Trainers of transformers and TRL.

    model = AutoModel.from_pretrained(path, quantization_config=AmpRewriteConfig(dtype="fp16"))
    trainer = Trainer(model, args, callbacks=[AmpRewriteCallback(dtype="fp16")])

1. Importing this module registers the config under the name "amprewrite". `save_pretrained` saves the config with the model, so a process
   must import this module before it loads the saved model.
2. The config and the callback rewrite the model in place, because transformers keeps a reference to the original object.
3. Modules in a model class's `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict` stay fp32, unless `overrides` says otherwise.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from amprewrite.api.rewrite import checked_options, restore, rewrite
from amprewrite.report.cast_plan import CastPlan
from amprewrite.runtime.model.rewritten import is_rewritten, session_of
from amprewrite.runtime.weights.half_values import upcast
from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.devices import best_format, named_device
from amprewrite.tables.errors import AmpRewriteWarning, MissingPackageError, PolicyError
from amprewrite.tables.formats import FP32, LOW_DTYPES, LOW_FORMATS, dtype_name, parse_format

try:
    from transformers import TrainerCallback
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise MissingPackageError("amprewrite.integrations.transformers", "transformers", "transformers") from error

NAME = "amprewrite"
_SAVED = ("dtype", "lists", "overrides", "plan", "loss_scale", "pad", "granularity", "backend", "cache_weights", "strict")
"""The options of `rewrite` that config.json can hold. Other options depend on a machine or on batches, so they are not saved."""


@register_quantization_config(NAME)
class AmpRewriteConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """A quantization config with options of `amprewrite.rewrite`. It is saved with the model. `plan` is a CastPlan or its JSON text.

    Raises PolicyError for an option that cannot be saved or is invalid, and for a value that JSON cannot hold.
    """

    def __init__(self, **options: Any) -> None:
        options = {name: value for name, value in options.items() if name != "quant_method"}
        unknown = sorted(options.keys() - set(_SAVED))
        if unknown:
            raise PolicyError(f"AmpRewriteConfig has no option {unknown[0]!r}; it takes {', '.join(_SAVED)}")
        if isinstance(options.get("dtype"), torch.dtype):
            options["dtype"] = parse_format(options["dtype"]).name
        if isinstance(options.get("plan"), CastPlan):
            options["plan"] = options["plan"].to_json()
        for name, value in options.items():
            if not _is_json(value):
                raise PolicyError(
                    f"AmpRewriteConfig is saved as JSON, which cannot say {name}={shown(value)}; use amprewrite.rewrite(model)"
                )
        self.quant_method = NAME  # type: ignore[assignment]
        self.options = options
        checked_options(**{name: value for name, value in self.rewrite_options().items() if name != "granularity"})

    def rewrite_options(self) -> dict[str, Any]:
        """Return the options as keyword arguments of `rewrite`. The plan, which is kept as JSON text, becomes a CastPlan."""
        plan = self.options.get("plan")
        return {**self.options, **({} if plan is None else {"plan": CastPlan.from_json(plan)})}

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a dict, which transformers writes to the model's config.json."""
        return {"quant_method": self.quant_method, **self.options}


@register_quantizer(NAME)
class AmpRewriteQuantizer(HfQuantizer):  # type: ignore[misc]
    """The hooks that transformers calls as it loads a model with an AmpRewriteConfig."""

    is_trainable = True
    is_qat_trainable = True
    is_compileable = False

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Return True: a rewritten model can be saved, with fp32 weights under their own names."""
        return True

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return fp32 as the dtype for loading weights, because they are the master weights. Warn if the user asked for fp16 or bf16."""
        if dtype in LOW_DTYPES:
            warnings.warn(
                f"this model would be loaded in {dtype_name(dtype)}; with AmpRewriteConfig its weights are loaded in fp32, as master "
                "weights, and its ops run low. Give dtype=torch.float32 to say so yourself",
                AmpRewriteWarning,
                stacklevel=2,
            )
        return FP32.dtype

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        """Convert the model to fp32 before its weights are loaded: transformers from 5.0 on ignores the result of `update_dtype`."""
        upcast(model)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        return rewrite(model, inplace=True, **_with_fp32_modules(model, self.quantization_config.rewrite_options()))  # type: ignore[attr-defined]

    def _dequantize(self, model: nn.Module, dtype: Any = None) -> nn.Module:
        """Undo the rewrite and return the fp32 model. transformers calls this in `model.dequantize()`."""
        return restore(model)


class AmpRewriteCallback(TrainerCallback):  # type: ignore[misc]
    """Rewrites the Trainer's model in place, skips steps with overflowed gradients, and logs the loss scale and skipped steps.

    `options` are the options of `amprewrite.rewrite`. An already rewritten model does not change. Raises PolicyError if the
    Trainer's arguments ask for mixed precision or for torch.compile around the model.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._model: nn.Module | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Rewrite the model once the Trainer is built, so that evaluation and prediction before training use the low format, too."""
        self._take(args, model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        """Attach the optimizer, so that it skips steps with overflowed gradients. Rewrite a model that `model_init` made for this run."""
        self._take(args, model)
        if self._model is not None and optimizer is not None:
            session_of(self._model).training.gate.attach_if_own(optimizer)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add `loss_scale` and `skipped_steps` to the logs if the model has a loss scale."""
        if self._model is None or logs is None or not session_of(self._model).training.loss_scale.enabled:
            return
        report = session_of(self._model).training.loss_scale.report()
        found = {"loss_scale": report.scale, "skipped_steps": report.skipped}
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def _take(self, args: Any, model: Any) -> None:
        _refuse_own_precision(args)
        if not isinstance(model, nn.Module):
            return
        model = _inside(model)
        if not is_rewritten(model):
            rewrite(model, inplace=True, **_with_fp32_modules(model, self._options))
        self._model = model


def _refuse_own_precision(args: Any) -> None:
    """Raise PolicyError if the Trainer would put torch.autocast or torch.compile around the rewritten model."""
    for row in LOW_FORMATS:
        if getattr(args, row.name, False):
            default = " (TRL's default)" if "trl" in type(args).__module__ else ""
            raise PolicyError(
                f"{type(args).__name__}({row.name}=True){default} runs the model under torch.autocast, and a rewritten model has its "
                f"casts in its graph: give {row.name}=False there, and AmpRewriteCallback(dtype={row.name!r}) here"
            )
    if getattr(args, "torch_compile", False):
        raise PolicyError(
            f"{type(args).__name__}(torch_compile=True) would compile around the rewritten model, whose graphs it cannot see: give "
            "torch_compile=False there, and AmpRewriteCallback(backend='inductor') here"
        )


def _inside(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers DataParallel and DistributedDataParallel."""
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module
    return model


def _with_fp32_modules(model: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` plus overrides that keep the modules in `fp32_modules(model)` in fp32. If `options` has a plan, none are added."""
    if options.get("plan") is not None:
        return dict(options)
    low, device = options.get("dtype"), options.get("device")
    where = {p.device for p in model.parameters()} if device is None else {named_device(device)}
    formats = map(best_format, where) if low is None else (parse_format(low),)
    narrow = any(each is not None and each.narrow for each in formats)
    kept = {f"module:{path}": FP32.name for path in fp32_modules(model, narrow)}
    return {**options, "overrides": {**kept, **(options.get("overrides") or {})}}


def fp32_modules(model: nn.Module, narrow: bool) -> Iterator[str]:
    """Yield the paths of the modules that must stay fp32, because the model's class lists their names or names of their tensors.

    `_keep_in_fp32_modules_strict` is always read, `_keep_in_fp32_modules` only if `narrow` is True (the low format is fp16). The name of a
    tensor is ignored if its module has submodules, because an override of the module would keep the submodules in fp32, too.
    """
    names = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    if narrow:
        names |= {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    if not names:
        return
    pattern = re.compile("|".join(rf"(?:^|\.){re.escape(name)}$" for name in sorted(names)))
    for path, module in model.named_modules():
        own = () if module._modules else (*module._parameters, *module._buffers)
        if path and any(map(pattern.search, (path, *(f"{path}.{name}" for name in own)))):
            yield path


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


__all__ = ["NAME", "AmpRewriteCallback", "AmpRewriteConfig", "AmpRewriteQuantizer", "fp32_modules"]
