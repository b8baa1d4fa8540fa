"""Provide the rewrite as a backend of torch.compile, for training loops that already use torch.compile.

    compiled = torch.compile(model, backend="amprewrite", options={"dtype": "bf16", "backend": "inductor"})
    amprewrite.compiled(compiled).plan

The backend takes these options of `rewrite`: dtype, lists, overrides, plan, device, measure, memory, high, loss_scale, pad, backend and
strict. Options that concern the module object (granularity, inplace, cache_weights) do not apply, since torch.compile handles the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amprewrite.api.rewrite import check_patterns, checked_options
from amprewrite.report.cast_plan import CastPlan
from amprewrite.runtime.training.loss_scale import LossScale
from amprewrite.runtime.training.optimizers.find_optimizers import optimizer_inside
from amprewrite.tables.errors import PlanError, PolicyError

if TYPE_CHECKING:
    from amprewrite.runtime.torch_compile import CompiledSession

OPTIONS = (
    "dtype", "lists", "overrides", "plan", "device", "measure", "memory", "high", "loss_scale", "pad", "backend", "strict",
)  # fmt: skip
"""The options of `rewrite` that the backend takes."""


def compile_backend(
    graph: Any, inputs: list[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Rewrite one captured `graph`, and return the function that runs it. torch.compile finds this backend by the name "amprewrite".

    Dynamo calls this backend with each graph and example `inputs`. `options` are options of `amprewrite.rewrite`, such as
    {"dtype": "bf16"}; `OPTIONS` in `amprewrite.api.compile_backend` lists their names. `mode` is an option of inductor and is refused.
    Raises PolicyError for invalid options; torch.compile reports it inside an error of its own.
    """
    from amprewrite.runtime.torch_compile import compile_graph

    if mode is not None:
        raise PolicyError(
            f"torch.compile(backend='amprewrite') takes no mode={mode!r}, which is inductor's; give options={{'backend': "
            "functools.partial(torch._inductor.compile, options=...)} to compile the rewritten graphs with settings of inductor"
        )
    given = dict(options or {})
    unknown = sorted(given.keys() - set(OPTIONS))
    if unknown:
        raise PolicyError(
            f"torch.compile(backend='amprewrite') does not understand the option {unknown[0]!r}; it takes {', '.join(OPTIONS)}, and "
            "amprewrite.rewrite takes the others"
        )
    if given.get("backend") is compile_backend:
        given["backend"] = "amprewrite"  # give a name that `checked_options` refuses: the backend cannot be its own compiler
    return compile_graph(graph, inputs, checked_options(**given, cache_weights=False))


class Compiled:
    """The plan and the loss scale of a module that torch.compile runs with the backend "amprewrite"."""

    def __init__(self, session: CompiledSession) -> None:
        self._session = session

    @property
    def plan(self) -> CastPlan:
        """The plan of all graphs that were captured so far, in training, in evaluation and for all shapes."""
        return CastPlan.of(self._session.plan_of(self._session.regions))

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale built into the training graphs."""
        return self._session.training.loss_scale

    def attach(self, optimizer: torch.optim.Optimizer, copies: bool = False) -> None:
        """Have `optimizer` skip steps with overflowed gradients, like `attach` of a rewritten model.

        Optimizers that are not attached are found automatically. `copies=True` means that the optimizer steps copies of the parameters, not
        the parameters themselves. Raises PolicyError if the optimizer is attached already, or, without `copies`, if it has none of the
        model's parameters.
        """
        self._session.training.gate.attach(optimizer_inside(optimizer), copies)

    def check_patterns(self) -> None:
        """Raise PolicyError if a module pattern of `overrides` or `pad` matches no module. Call it after all parts were captured."""
        check_patterns(self._session.options, self._session.root)


def compiled(module: nn.Module) -> Compiled:
    """Return an object with the plan and the loss scale of `module` under torch.compile(module, backend="amprewrite").

    `module` is the module or the result of torch.compile. If the module was compiled with several sets of options, the latest set counts.
    Raises PolicyError if `module` is no module, PlanError if this backend has captured nothing of it yet.
    """
    from amprewrite.runtime.torch_compile import sessions_of

    if not isinstance(module, nn.Module):
        raise PolicyError(f"compiled() takes a module, not {type(module).__name__}; pass what torch.compile was given")
    found = sessions_of(module)
    if not found:
        raise PlanError(
            f"torch.compile(backend='amprewrite') has captured nothing of this {type(module).__name__}; call it once. If Dynamo gave it "
            "up, as it does forwards with an LSTM or GRU, TORCH_LOGS=graph_breaks says why, and amprewrite.rewrite(model) rewrites it"
        )
    return Compiled(found[-1])
