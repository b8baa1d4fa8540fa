"""The module that `rewrite` returns: of the same class as the original, with a plan."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from amprewrite.ir.plans.plan import CastPlan, PendingPlan
from amprewrite.runtime.ambient.hook_watch import call_with_own_hooks
from amprewrite.runtime.compiler.dynamo import fresh_code, kept_out, never_read
from amprewrite.runtime.model.clone import twin_of
from amprewrite.runtime.model.half_parameters import lost_masters
from amprewrite.runtime.model.parts import part_paths
from amprewrite.runtime.model.subclass import original_of, subclass_of
from amprewrite.runtime.options import Options
from amprewrite.runtime.session import OUR_DOOR, Entry, Session, enter
from amprewrite.runtime.training.find_optimizers import optimizer_inside
from amprewrite.runtime.training.loss_scale import LossScale
from amprewrite.tables.errors import CaptureError, EmitError, PlanError, PolicyError

if TYPE_CHECKING:
    from amprewrite.api.onnx.convert import OnnxResult

_SESSION = "_amprewrite_session"
_FORWARD = "_amprewrite_forward"
_REPLICATE = "_replicate_for_data_parallel"


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
        found at the first forward, or at their first step; attaching tells mistakes early. One that steps `copies` of the
        parameters, offloaded to another device say, cannot be found: attach it. Of a wrapper, such as
        accelerate's, the torch optimizer inside is guarded.
        """
        session_of(self).attach(optimizer_inside(optimizer), copies)

    def export_program(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **options: Any) -> torch.export.ExportedProgram:
        """A torch.export.ExportedProgram of the rewritten graph, whole and ahead of time.

        `options` go to torch.export.export (dynamic_shapes, strict). Raises CaptureError where export cannot capture the model.
        """
        from amprewrite.api.export_program import export_program

        return export_program(self, args, kwargs or {}, **options)

    def export_onnx(
        self, path: Any, args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None, **options: Any
    ) -> OnnxResult:
        """Write the rewritten model as an ONNX file; `amprewrite.api.onnx.convert.export_onnx` has the options and the result.

        EmitError where the onnx extra is not installed.
        """
        return onnx_road().export_onnx(self, path, args, kwargs, **options)

    # -- low copies of weights -----------------------------------------------------
    def frozen_weights(self) -> AbstractContextManager[None]:
        """Keep low copies of the weights while a `with` block is open: you promise that no weight changes inside, in any thread.

        Writes that PyTorch counts are followed all the same. At the end of the outermost block every copy is compared with
        its weight, and one that differs is a StaleWeightsError.
        """
        session = session_of(self)
        return session.cache.frozen(session.weight_names, "frozen_weights()", everywhere=True)

    def weights_changed(self) -> None:
        """Drop every low copy of the weights that is kept.

        Call it after a write that PyTorch does not count, if `frozen_weights()` or `cache_weights="step"` keeps copies.
        """
        session_of(self).cache.clear()

    # -- what must stay in step with the parameters --------------------------------
    def train(self, mode: bool = True) -> Any:
        if is_rewritten(self) and any(module.training != mode for module in self.modules()):
            session_of(self).cache.clear()
        if is_rewritten(self):
            session_of(self).take_in()
        return super().train(mode)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if is_rewritten(self):
            session_of(self).cache.clear()
            session_of(self).schedule.due = True
        return super().load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        if not is_rewritten(self):
            return super()._apply(*args, **kwargs)
        session = session_of(self)
        session.cache.clear()
        applied = super()._apply(*args, **kwargs)
        session.take_in()
        session.warn_once(lost_masters(self))
        return applied

    # -- copies stay rewritten --------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        if not is_rewritten(self):
            return _plain_deepcopy(self, memo)
        twin: nn.Module = rewritten(copy.deepcopy(plain_of(self), memo), copy.deepcopy(_options_with_scale(self), memo))
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not is_rewritten(self):
            return super().__reduce_ex__(protocol)
        return rewritten, (plain_of(self), _options_with_scale(self))

    def _replicate_for_data_parallel(self) -> Any:
        if is_rewritten(self):
            raise CaptureError(_NO_REPLICAS)
        return super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]

    def __prepare_scriptable__(self) -> Any:
        if is_rewritten(self):
            raise CaptureError(
                "a rewritten model cannot be compiled by torch.jit.script, which cannot read its casts; use "
                "amp.export_program(args) for a file without Python, or rewrite(..., backend='inductor') for speed"
            )
        return self

    # -- its class ----------------------------------------------------------------------
    def __init_subclass__(cls, **kwargs: Any) -> None:
        """The subclass made for a rewrite enters no register of classes; one that a user derives from it does."""
        if original_of(cls) is None:
            super().__init_subclass__(**kwargs)

    @staticmethod
    def members_for(cls: type[nn.Module]) -> dict[str, Any]:
        """What the subclass made from `cls` has of its own: a forward with the signature of the original's."""

        @functools.wraps(cls.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            session = self.__dict__.get(_SESSION)
            if session is None:
                return cls.forward(self, *args, **kwargs)
            if session.root is not self:
                raise CaptureError(_FOREIGN_SESSION)
            return enter(session, "", args, kwargs)

        own: dict[str, Any] = {"forward": forward}
        generate = getattr(cls, "generate", None)
        if inspect.isfunction(generate):
            own["generate"] = _generate_with_kept_copies(generate)
        return own


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
    _refuse_sharded(model)
    return model


def _refuse_sharded(model: nn.Module) -> None:
    """CaptureError if FSDP has taken the model over: its state stays with the module that it was given."""
    for path, module in model.named_modules():
        names = {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch.distributed.")}
        place = path or "the model"
        if "FSDPModule" in names:
            raise CaptureError(
                f"{place} went through fully_shard, which must come after the rewrite: amp = rewrite(model, granularity='blocks'), "
                "then fully_shard(block) for each block of amp, then fully_shard(amp)"
            )
        if "FullyShardedDataParallel" in names:
            raise CaptureError(
                f"{place} is wrapped in FSDP, which must come after the rewrite: amp = rewrite(model), then "
                "FSDP(amp, use_orig_params=True)"
            )


def onnx_road() -> ModuleType:
    """amprewrite.api.onnx.convert, which needs the onnx extra; EmitError with the install line where that is missing."""
    try:
        from amprewrite.api.onnx import convert
    except ImportError as error:
        raise EmitError(f"ONNX needs {error.name}, which is not installed: pip install 'amprewrite[onnx]' (GPU: [onnx-gpu])") from error
    return convert


_NO_REPLICAS = (
    "torch.nn.DataParallel cannot replicate a rewritten model: the replicas would compute with the parameters of the original; "
    "use torch.nn.parallel.DistributedDataParallel with one process a device (torchrun starts them), or show the process one "
    "device only"
)
_FOREIGN_SESSION = (
    "this module shares the attributes of a rewritten model and would compute with that model's parameters; make copies of a "
    "rewritten model with copy.copy or copy.deepcopy, or rewrite the copy of the original"
)


def is_rewritten(model: nn.Module) -> bool:
    """Whether the module itself came out of a rewrite. One whose class merely derives from such a module's class did not."""
    return _SESSION in model.__dict__


def session_of(model: nn.Module) -> Session:
    """The session of a rewritten model; PlanError if the module was never rewritten."""
    found: Session | None = model.__dict__.get(_SESSION)
    if found is None:
        raise PlanError(f"this {type(model).__name__} was not rewritten, so it has no plan; call amprewrite.rewrite(model) first")
    return found


def _plain_deepcopy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """What copy.deepcopy does without a `__deepcopy__`, or the original class's own."""
    own = getattr(super(Rewritten, model), "__deepcopy__", None)
    if own is not None:
        found: nn.Module = own(memo)
        return found
    clone = memo[id(model)] = type(model).__new__(type(model))
    clone.__setstate__(copy.deepcopy(model.__getstate__(), memo))  # type: ignore[operator, arg-type]
    return clone


def _options_with_scale(model: nn.Module) -> Options:
    """The options of a model with its loss scale as it stands, for a copy to go on from."""
    session = session_of(model)
    return replace(session.options, loss_scale=session.loss_scale)


def original_class(model: nn.Module) -> type[nn.Module]:
    order = type(model).__mro__  # FSDP2 puts a class of its own in front
    found: type[nn.Module] = order[order.index(Rewritten) + 1] if is_rewritten(model) else type(model)
    return found


def plain_of(model: nn.Module) -> nn.Module:
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
        module.__dict__.pop(_REPLICATE, None)
        own_forward = module.__dict__.pop(_FORWARD, None)
        if own_forward is not None:
            module.__dict__["forward"] = own_forward


def _generate_with_kept_copies(generate: Callable[..., Any]) -> Callable[..., Any]:
    """`generate` of a model's class, whose many calls cast each weight once."""

    @functools.wraps(generate)
    def generate_with_kept_copies(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        session: Session | None = self.__dict__.get(_SESSION)
        if session is None:
            return generate(self, *args, **kwargs)
        with session.cache.frozen(session.weight_names, "generate()", everywhere=False):
            return generate(self, *args, **kwargs)

    return generate_with_kept_copies


def rewritten(model: nn.Module, options: Options, kind: type[Session] = Session) -> Any:
    """A rewritten twin of a plain model; nothing is captured yet. Parts that were rewritten before are taken over."""
    cls = type(model)
    if issubclass(cls, Rewritten):
        raise PolicyError(
            f"{cls.__name__} derives from the class of a rewritten module; derive it from the original class, "
            "type(model) of the model before the rewrite"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError("a TorchScript module hides its Python code from capture; rewrite the model it was made from")
    amp = twin_of(model, subclass_of(Rewritten, cls))
    session = kind(options, amp)
    amp.__dict__[_SESSION] = session
    parts = part_paths(model, options.granularity)
    session.entries[""] = Entry(session, "", _take_forward(amp, cls), captured=not parts)
    known: weakref.WeakSet[nn.Module] = weakref.WeakSet([amp])
    for path, module in _modules_not_in(known, amp, session):
        if is_rewritten(module):
            _unwrap(module)
        if path in parts:
            session.entries[path] = Entry(session, path, _take_forward(module, type(module)))
            module.__dict__["forward"] = PartForward(session, path)
            module.__dict__[_REPLICATE] = PartReplicas(module)
        elif not parts or _is_inside(path, parts):
            _call_as_part(session, path, module)
    session.take_in = lambda: _take_in(session, parts, known)
    return amp


def _modules_not_in(known: weakref.WeakSet[nn.Module], amp: nn.Module, session: Session) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `amp` that are not `known` yet, each once, and from now on they are; TorchScript is listed as unreadable."""
    scripted = ""
    for path, module in amp.named_modules():
        if module in known:
            continue
        known.add(module)
        if not isinstance(module, torch.jit.ScriptModule):
            yield path, module
        elif not scripted or not path.startswith(scripted):
            scripted = f"{path}."
            session.cannot_read(path, "a TorchScript module hides its Python code; put in the module it was made from")


def _take_in(session: Session, parts: tuple[str, ...], known: weakref.WeakSet[nn.Module]) -> None:
    """Rewrite the calls of modules that were put into the model after the rewrite, such as a new head."""
    for path, module in _modules_not_in(known, session.root, session):
        if module._compiled_call_impl is not None or is_rewritten(module):
            continue  # compiled or rewritten by itself
        if not parts or _is_inside(path, parts):
            _call_as_part(session, path, module)
        elif next(module.parameters(recurse=False), None) is not None:
            session.cannot_read(path, "it was put in after the rewrite, which chose the parts of granularity=; rewrite the model again")


def _is_inside(path: str, parts: tuple[str, ...]) -> bool:
    return path.startswith(tuple(f"{part}." for part in parts))


def _call_as_part(session: Session, path: str, module: nn.Module) -> None:
    module._compiled_call_impl = part_call(session, path, module)
    module.__dict__[_REPLICATE] = PartReplicas(module)


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


class PartReplicas:
    """What torch.nn.DataParallel calls on a part: its replicas would run the part itself. Copies of the part are free."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part

    def __call__(self) -> Any:
        if self.part._compiled_call_impl is not None or isinstance(self.part.__dict__.get("forward"), PartForward):
            raise CaptureError(_NO_REPLICAS)
        return type(self.part)._replicate_for_data_parallel(self.part)


def part_call(session: Session, path: str, module: nn.Module) -> Callable[..., Any]:
    """What `amp.encoder(x)` runs. Inside a call of the whole model the part just runs; by itself it is an entry of its own.

    Dynamo reads through it where it captures the whole model, and finds in it a frame to capture where it cannot. Where
    Dynamo is kept out, as by a checkpoint around code that cannot be captured, the part is an entry of its own again.
    """

    @torch.compiler.assume_constant_result  # type: ignore[misc]
    def inside() -> bool:
        return session.state.captured > 0 and not kept_out()

    never_read(inside)
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
        entry = session.entries.get(path)
        if entry is None or entry.function is not call_part:  # another module may have stood there before
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
