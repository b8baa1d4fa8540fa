"""The module that `rewrite` returns: of the same class as the original, with a plan."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from amprewrite.dynamo import fresh_code, kept_out
from amprewrite.errors import CaptureError, EmitError, PolicyError
from amprewrite.granularity import part_paths
from amprewrite.hook_watch import call_with_own_hooks
from amprewrite.loss_scale import LossScale
from amprewrite.options import Options
from amprewrite.plan import CastPlan, PendingPlan
from amprewrite.runtime import OUR_DOOR, Entry, Session, enter
from amprewrite.twin import twin_of

if TYPE_CHECKING:
    from amprewrite.convert import OnnxResult

_SESSION = "_amprewrite_session"
_FORWARD = "_amprewrite_forward"


class Rewritten(nn.Module):
    """What a rewritten model has beyond its own class.

    A part called by itself (`amp.encoder(x)`) runs rewritten too. Two things it cannot tell: a `torch.compile` of yours around
    a part alone, and a part's `forward` called by name, which both run the part's own code. Hooks on all modules of the
    process (`register_module_forward_hook`) see the model as one call, beside parts that run as they are written.
    """

    @property
    def plan(self) -> CastPlan:
        """The plan of the graphs that ran in the latest call. Before the first, reading it is a PlanError."""
        session = session_of(self)
        if not session.last and not session.left_out:
            return PendingPlan()  # type: ignore[return-value]
        return session.plan_of(session.last)

    @property
    def plans(self) -> tuple[CastPlan, ...]:
        """One plan for every set of graphs that has run: training, evaluation, other shapes."""
        session = session_of(self)
        return tuple(session.plan_of(regions) for regions in list(session.calls))

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale built into the training graphs: `report()`, `value`, `state_dict()`, `load_state_dict()`."""
        return session_of(self).loss_scale

    def attach(self, optimizer: torch.optim.Optimizer, copies: bool = False) -> None:
        """Guard the steps of `optimizer`: one whose gradients overflowed is skipped, and the loss scale moves.

        PolicyError if it is attached already or owns none of the model's parameters. Optimizers that were never attached are
        found at their first step; attaching tells mistakes early. One that steps `copies` of the parameters, offloaded to
        another device say, cannot be found: attach it.
        """
        session_of(self).attach(optimizer, copies)

    def export_program(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **options: Any) -> torch.export.ExportedProgram:
        """A torch.export.ExportedProgram of the rewritten graph, whole and ahead of time.

        `options` go to torch.export.export (dynamic_shapes, strict). Raises CaptureError where export cannot capture the model.
        """
        from amprewrite.frontends.torch_export import export_program

        return export_program(self, args, kwargs or {}, **options)

    def export_onnx(
        self, path: Any, args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None, **options: Any
    ) -> OnnxResult:
        """Write the rewritten model as an ONNX file; `amprewrite.convert.export_onnx` has the options and the result.

        EmitError where the onnx extra is not installed.
        """
        return onnx_road().export_onnx(self, path, args, kwargs, **options)

    # -- what must stay in step with the parameters --------------------------------
    def train(self, mode: bool = True) -> Any:
        session_of(self).cache.clear()
        return super().train(mode)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        session_of(self).cache.clear()
        return super().load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        session_of(self).cache.clear()
        return super()._apply(*args, **kwargs)

    # -- copies stay rewritten --------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        twin = rewritten(copy.deepcopy(plain_of(self), memo), copy.deepcopy(_options_with_scale(self), memo))
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rewritten, (plain_of(self), _options_with_scale(self))


def module_of(model: Any) -> nn.Module:
    """The module to rewrite; PolicyError or CaptureError for what is none."""
    if isinstance(model, torch.export.ExportedProgram):
        module = model.module()
        assert isinstance(module, nn.Module)
        return module
    if not isinstance(model, nn.Module):
        name = type(model).__name__
        raise PolicyError(f"rewrite takes an nn.Module or an ExportedProgram, not {name}; wrap functions in a module")
    if type(model).__name__ == "OptimizedModule":
        raise CaptureError("this module went through torch.compile; rewrite the original with backend='inductor' instead")
    return model


def onnx_road() -> ModuleType:
    """amprewrite.convert, which needs the onnx extra; EmitError with the install line where that is missing."""
    try:
        from amprewrite import convert
    except ImportError as error:
        raise EmitError(f"ONNX needs {error.name}, which is not installed: pip install 'amprewrite[onnx]' (GPU: [onnx-gpu])") from error
    return convert


def session_of(model: nn.Module) -> Session:
    found: Session = model.__dict__[_SESSION]
    return found


def _options_with_scale(model: nn.Module) -> Options:
    """The options of a model with its loss scale as it stands, for a copy to go on from."""
    session = session_of(model)
    return replace(session.options, loss_scale=session.loss_scale)


def original_class(model: nn.Module) -> type[nn.Module]:
    order = type(model).__mro__  # FSDP2 puts a class of its own in front
    found: type[nn.Module] = order[order.index(Rewritten) + 1] if isinstance(model, Rewritten) else type(model)
    return found


def plain_of(model: Rewritten) -> nn.Module:
    """A twin of the model as it was before the rewrite, around the same parameters."""
    plain = twin_of(model)
    _unwrap(plain)
    return plain


def _unwrap(twin: nn.Module) -> None:
    """Turn a fresh twin of a rewritten module into what that was before, in place."""
    twin.__class__ = original_class(twin)
    twin.__dict__.pop(_SESSION)
    for module in twin.modules():
        if isinstance(module.__dict__.get("forward"), PartForward):
            del module.__dict__["forward"]
        own_forward = module.__dict__.pop(_FORWARD, None)
        if own_forward is not None:
            module.__dict__["forward"] = own_forward


@functools.cache
def rewritten_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `cls` that enters through its session; it bears the same name, for libraries that look classes up by name."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return enter(self.__dict__[_SESSION], "", args, kwargs)

    made = type(cls.__name__, (Rewritten, cls), {"forward": forward, "__doc__": cls.__doc__})
    made.__module__, made.__qualname__ = cls.__module__, cls.__qualname__
    return made


def rewritten(model: nn.Module, options: Options, kind: type[Session] = Session) -> Any:
    """A rewritten twin of a plain model; nothing is captured yet. Parts that were rewritten before are taken over."""
    cls = type(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError("a TorchScript module hides its Python code from capture; rewrite the model it was made from")
    amp = twin_of(model, rewritten_class(cls))  # type: ignore[arg-type]
    session = kind(options, amp)
    amp.__dict__[_SESSION] = session
    parts = part_paths(model, options.granularity)
    session.entries[""] = Entry(session, "", _take_forward(amp, cls), captured=not parts)
    scripted = ""
    for path, module in amp.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            if not scripted or not path.startswith(scripted):
                scripted = f"{path}."
                session.cannot_read(path, "a TorchScript module hides its Python code; put in the module it was made from")
        elif module is not amp:
            if isinstance(module, Rewritten):
                _unwrap(module)
            if path in parts:
                session.entries[path] = Entry(session, path, _take_forward(module, type(module)))
                module.__dict__["forward"] = PartForward(session, path)
            elif not parts or path.startswith(tuple(f"{part}." for part in parts)):
                module._compiled_call_impl = part_call(session, path, module)
    return amp


def _take_forward(module: nn.Module, cls: type[nn.Module]) -> Callable[..., Any]:
    """What `module` runs as its forward; one set on the instance, by hooks of accelerate and the like, is put aside."""
    own_forward: Callable[..., Any] | None = module.__dict__.pop("forward", None)
    if own_forward is None:
        return cls.forward.__get__(module)  # type: ignore[no-any-return]
    module.__dict__[_FORWARD] = own_forward
    return own_forward


class PartForward:
    """The forward of a part that is captured by itself: hooks on the part, such as FSDP2's, run around it."""

    def __init__(self, session: Session, path: str) -> None:
        self.session, self.path = session, path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return enter(self.session, self.path, args, kwargs)


def part_call(session: Session, path: str, module: nn.Module) -> Callable[..., Any]:
    """What `amp.encoder(x)` runs. Inside a call of the whole model the part just runs; by itself it is an entry of its own.

    Dynamo reads through it where it captures the whole model, and finds in it a frame to capture where it cannot. Where
    Dynamo is kept out, as by a checkpoint around code that cannot be captured, the part is an entry of its own again.
    """

    @torch.compiler.assume_constant_result  # type: ignore[misc]
    def inside() -> bool:
        return session.state.captured > 0 and not kept_out()

    recurrent = isinstance(module, nn.RNNBase)
    @torch._dynamo.disable(recursive=False, reason=OUR_DOOR)  # type: ignore[misc]
    def call_unread(why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ran = len(session.state.ran)
        result = module._call_impl(*args, **kwargs)
        if len(session.state.ran) == ran:
            session.cannot_read(path, why)
        return result

    def call_part(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    def call_alone(*args: Any, **kwargs: Any) -> Any:
        if path not in session.entries:
            session.entries[path] = Entry(session, path, call_part)
        return enter(session, path, args, kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if inside():
            if recurrent and isinstance(args[0] if args else kwargs.get("input"), PackedSequence):
                return call_unread("capture cannot read a packed sequence, whose sizes are data; pad the sequences instead", args, kwargs)
            if module._backward_hooks or module._backward_pre_hooks:
                return call_unread("capture cannot read the backward hooks on it; hook tensors or its parent instead", args, kwargs)
            return call_with_own_hooks(module, args, kwargs)
        return call_alone(*args, **kwargs)

    if recurrent and session.recurrent_apart:
        return torch._dynamo.disable(call_alone, reason=OUR_DOOR)  # type: ignore[no-any-return]
    return fresh_code(call)
