"""torch.compile(model, backend="amprewrite"): the rewrite as a backend, for loops that say torch.compile already.

    compiled = torch.compile(model, backend="amprewrite", options={"dtype": "bf16", "backend": "inductor"})
    amprewrite.compiled(compiled).plan

Options are those of `rewrite` that are about graphs: dtype, lists, overrides, plan, device, measure, memory, high, loss_scale, pad,
backend and strict. What is about a module as an object (granularity, inplace, cache_weights) is torch.compile's own business here.
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


def compile_backend(
    graph: Any, inputs: list[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """The backend that torch.compile finds by the name "amprewrite"; it is called with each graph that Dynamo captures.

    `options` are those of `amprewrite.rewrite` that concern graphs, such as {"dtype": "bf16"}; OPTIONS of
    `amprewrite.api.compile_backend` names them. `mode` is inductor's and is refused. Raises PolicyError for options that make no
    sense. torch.compile shows it as the cause of its own error.
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
    if given.get("backend") in ("amprewrite", compile_backend):
        raise PolicyError("options={'backend': 'amprewrite'} would rewrite a rewritten graph; name the compiler: 'inductor' or 'eager'")
    return compile_graph(graph, inputs, checked_options(**given, cache_weights=False))


class Compiled:
    """What torch.compile's backend "amprewrite" has made of one module: its plans and its loss scale."""

    def __init__(self, session: CompiledSession) -> None:
        self._session = session

    @property
    def plan(self) -> CastPlan:
        """The plan of every graph so far, training and evaluation and all shapes together."""
        session = self._session
        return CastPlan.of(session.plan_of(tuple(session.entries[""].graphs.regions)))

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale built into the training graphs."""
        return self._session.loss_scale

    def attach(self, optimizer: torch.optim.Optimizer, copies: bool = False) -> None:
        """Guard the steps of `optimizer`, as `attach` of a rewritten model does. Others are found by themselves."""
        self._session.gate.attach(optimizer_inside(optimizer), copies)

    def check_patterns(self) -> None:
        """Raise PolicyError if a pattern of `overrides` or `pad` matches no module; call it once all parts were captured."""
        check_patterns(self._session.options, self._session.root)


def compiled(module: nn.Module) -> Compiled:
    """What torch.compile(module, backend="amprewrite") has captured so far, by its latest options.

    Takes the module or what torch.compile returned. PlanError if nothing of it was captured by this backend yet.
    """
    from amprewrite.runtime.torch_compile import sessions_of

    if not isinstance(module, nn.Module):
        raise PolicyError(f"compiled() takes a module, not {type(module).__name__}; pass what torch.compile was given")
    found = sessions_of(module)
    if not found:
        raise PlanError(
            f"torch.compile(backend='amprewrite') has captured nothing of this {type(module).__name__} yet; call it once, or call "
            "amprewrite.rewrite(model), whose result has a plan"
        )
    return Compiled(found[-1])


__all__ = ["OPTIONS", "Compiled", "compile_backend", "compiled"]
