"""Make the module that `rewrite` returns: an object of a subclass of the original class, with the same parameter objects."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from amprewrite.ir.evidence.agreed import NOTHING_AGREED
from amprewrite.runtime.ambient.kept_state import state_kept
from amprewrite.runtime.model.in_place import BEFORE, SESSION, Before, clone_of, original_of, subclass_of
from amprewrite.runtime.model.part_calls import (
    FORWARD,
    REPLICATE,
    PartForward,
    PartReplicas,
    call_as_part,
    call_packed,
    copies_itself,
    is_packed,
    replica_of,
)
from amprewrite.runtime.options import Options, part_paths
from amprewrite.runtime.session import Session, enter
from amprewrite.runtime.weights.freezing import (
    brings_fp32,
    hook_states,
    not_brought,
    refuse_frozen,
    unfreeze_weights,
    warn_of_rounded,
    without_frozen_weights,
)
from amprewrite.runtime.weights.half_values import conversion_warning
from amprewrite.tables.boundary.members import named_buffers_in, named_modules_in, named_parameters_in, parameters_in
from amprewrite.tables.errors import CaptureError, PlanError, PolicyError


class RewrittenBase(nn.Module):
    """Base of the classes of rewritten models. Its methods that change parameters, such as `load_state_dict`, drop the low copies of
    weights: their kept bf16 or fp16 casts. Copies and pickles of a rewritten model are rewritten, too.

    The subclass `Rewritten` in `api/module.py` adds the public methods, such as `plan`. Functions in this file get it as `face`.
    """

    # -- methods that change parameters drop the low copies of weights -----------------
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
            state = args[0] if args else kwargs.get("state_dict")
            if isinstance(state, Mapping) and brings_fp32(self, state):
                lost = not_brought(self, state)
                rounded = session_of(self).thaw()  # unfreeze with rounded values: the state dict below overwrites them
                warn_of_rounded([name for name in rounded if name in lost])
        return super().load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        if not is_rewritten(self):
            return super()._apply(*args, **kwargs)
        session = session_of(self)
        session.cache.clear()
        with without_frozen_weights(self, args[0] if args else kwargs["fn"]):
            applied = super()._apply(*args, **kwargs)
        session.take_in()
        session.warn_once(conversion_warning(self))
        return applied

    # -- methods that copy or pickle the model -----------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        if not is_rewritten(self):
            return _plain_deepcopy(self, memo)
        cls: Any = original_class(self)
        if copies_itself(cls):
            made = memo[id(self)] = copy.deepcopy(_twin_before(self), memo)
        else:  # copy this module, not its clone that `_twin_before` makes: other objects in the same deepcopy may refer to it
            state = {name: value for name, value in cls.__getstate__(self).items() if name not in (SESSION, BEFORE)}
            made = memo[id(self)] = cls.__new__(cls)
            made.__setstate__(copy.deepcopy(state, memo))
            for own in self.modules():
                if id(own) in memo:
                    _give_own_forward(memo[id(own)], isinstance(own.__dict__.get("forward"), PartForward))
        clone: nn.Module = _made_over(made, copy.deepcopy(_options_with_scale(self), memo), face_of(self), Session)
        return clone

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not is_rewritten(self):
            return super().__reduce_ex__(protocol)
        return wrap, (_twin_before(self), _options_with_scale(self), face_of(self))

    def _replicate_for_data_parallel(self) -> Any:
        if is_rewritten(self):
            return replica_of(session_of(self), self)
        return super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]

    def __prepare_scriptable__(self) -> Any:
        if is_rewritten(self):
            raise CaptureError(
                "a rewritten model cannot be compiled by torch.jit.script, which cannot read its casts; use "
                "amp.export_program(args) for a file without Python, or rewrite(..., backend='inductor') for speed"
            )
        return self

    # -- how subclasses are made -------------------------------------------------------
    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Call the `__init_subclass__` of the original class, which may register the new class, only if a user derives the new class."""
        if original_of(cls) is None:
            super().__init_subclass__(**kwargs)

    @staticmethod
    def members_for(cls: type[nn.Module]) -> dict[str, Any]:
        """Return the members that the rewritten subclass adds to `cls`: `forward` and, if `cls` has it, `generate`. Signatures are kept."""

        recurrent = issubclass(cls, nn.RNNBase)

        @functools.wraps(cls.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            session = self.__dict__.get(SESSION)
            if session is None:
                return cls.forward(self, *args, **kwargs)
            if session.root is not self:
                raise CaptureError(_FOREIGN_SESSION)
            if recurrent and is_packed(args, kwargs):
                return call_packed(session, "", self, functools.partial(cls.forward, self), args, kwargs)
            return enter(session, "", args, kwargs)

        own: dict[str, Any] = {"forward": forward}
        generate = getattr(cls, "generate", None)
        if inspect.isfunction(generate):
            own["generate"] = _generate_with_kept_copies(generate)
        return own


def module_of(model: Any) -> nn.Module:
    """Return the module to rewrite: `model` itself, or the module of an ExportedProgram.

    Raises PolicyError if `model` is neither; CaptureError if the module went through torch.compile, FSDP or DeepSpeed, or is lazy.
    """
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
    _refuse_lazy(model)
    return model


def _refuse_lazy(model: nn.Module) -> None:
    """Raise CaptureError if a parameter or buffer is lazy: it has no shape yet, and the first call changes the class of its module."""
    path = next((name for name, tensor in (*named_parameters_in(model), *named_buffers_in(model)) if is_lazy(tensor)), None)
    if path is not None:
        raise CaptureError(f"{path} belongs to a lazy module and has no shape yet; call the model once on an input, then rewrite it")


def _refuse_sharded(model: nn.Module) -> None:
    """Raise CaptureError if FSDP or DeepSpeed manages the model, because their state belongs to the original module, not to a clone."""
    modules = named_modules_in(model)
    sharding = {cls: _of_sharding(cls) for cls in {type(module) for _, module in modules}}
    for path, module in modules:
        if not (names := sharding[type(module)]):
            continue
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
        if "deepspeed" in names and hasattr(module, "zero_optimization"):
            raise CaptureError(f"{place} is a DeepSpeed engine; {_NO_DEEPSPEED}")
    if any(hasattr(parameter, "ds_id") for parameter in parameters_in(model)):
        raise CaptureError(f"DeepSpeed's ZeRO-3 has partitioned the parameters of this model; {_NO_DEEPSPEED}")


def _of_sharding(cls: type[nn.Module]) -> set[str]:
    """Return the names of the base classes of `cls` that torch.distributed defines, and "deepspeed" if DeepSpeed defines a base class."""
    homes = {base: base.__module__.partition(".")[0] for base in cls.__mro__}
    names = {base.__name__ for base in homes if base.__module__.startswith("torch.distributed.")}
    return names | {"deepspeed"}.intersection(homes.values())


_NO_DEEPSPEED = (
    "DeepSpeed takes the parameters and the optimizer over and runs a precision of its own; use fully_shard, which shards as ZeRO-3 does: "
    "amp = rewrite(model, granularity='blocks'), then fully_shard(block) for each block of amp, then fully_shard(amp)"
)

_FOREIGN_SESSION = (
    "this module shares the attributes of a rewritten model and would compute with that model's parameters; make copies of a "
    "rewritten model with copy.copy or copy.deepcopy, or rewrite the copy of the original"
)


def is_rewritten(model: nn.Module) -> bool:
    """True if the module itself was rewritten. False for a module whose class a user derived from the class of a rewritten module."""
    return SESSION in model.__dict__


def session_of(model: nn.Module) -> Session:
    """Return the session, which runs the calls of a rewritten model. Raises PlanError if the module was never rewritten."""
    found: Session | None = model.__dict__.get(SESSION)
    if found is None:
        raise PlanError(f"this {type(model).__name__} was not rewritten, so it has no plan; call amprewrite.rewrite(model) first")
    return found


def face_of(model: nn.Module) -> type[RewrittenBase]:
    """Return the base class that defines the public members of a rewritten model, such as `plan`."""
    order = type(model).__mro__  # search all classes, because after `fully_shard` the class of FSDP2 is the first
    return next(cls for cls in order if issubclass(cls, RewrittenBase) and original_of(cls) is None)


def _plain_deepcopy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a `model` that is not rewritten: call the `__deepcopy__` of its class, or copy the state if there is none."""
    own = getattr(super(RewrittenBase, model), "__deepcopy__", None)
    if own is not None:
        found: nn.Module = own(memo)
        return found
    clone = memo[id(model)] = type(model).__new__(type(model))
    clone.__setstate__(copy.deepcopy(model.__getstate__(), memo))  # type: ignore[operator, arg-type]
    return clone


def _options_with_scale(model: nn.Module) -> Options:
    """Return options for a copy of `model`: its own, with its current loss scale and, if it is frozen, the format chosen for each op."""
    session = session_of(model)
    agreed = NOTHING_AGREED if session.options.frozen is None else session.agreement.colours
    return replace(session.options, loss_scale=session.loss_scale, agreed=agreed)


def original_class(model: nn.Module) -> type[nn.Module]:
    """Return the class that a model had before it was rewritten; the class of `model` if it is not rewritten."""
    order = type(model).__mro__  # search all classes, because after `fully_shard` the class of FSDP2 is the first
    found: type[nn.Module] = order[order.index(RewrittenBase) + 1] if is_rewritten(model) else type(model)
    return found


def plain_of(model: nn.Module) -> nn.Module:
    """Return a clone of the model without the rewrite, with the same parameter objects. A frozen model's clone gets new fp32 parameters."""
    plain = _twin_before(model)
    if session_of(model).options.frozen is not None:
        unfreeze_weights(plain, (), None)
        hook_states(plain, frozen=False)
    return plain


def _twin_before(model: nn.Module) -> nn.Module:
    """Return a clone of the model without the rewrite, with the same parameter objects.

    Weights that `amp.freeze()` stored in the low format stay in this format.
    """
    plain = clone_of(model)
    _unwrap(plain)
    return plain


def _unwrap(clone: nn.Module) -> None:
    """Turn a clone of a rewritten module into a plain module, in place: give it the original class and the original forwards."""
    clone.__class__ = original_class(clone)
    clone.__dict__.pop(SESSION)
    clone.__dict__.pop(BEFORE, None)
    for module in clone.modules():
        module.__dict__.pop(REPLICATE, None)
        _give_own_forward(module, isinstance(module.__dict__.get("forward"), PartForward))


def _give_own_forward(module: nn.Module, is_part: bool) -> None:
    """Let calls of `module` run the forward from before the rewrite. `is_part`: the rewrite set `module.forward`, which is then removed."""
    if is_part:
        module.__dict__.pop("forward", None)
    own_forward = module.__dict__.pop(FORWARD, None)
    if own_forward is not None:
        module.__dict__["forward"] = own_forward


def _generate_with_kept_copies(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `generate`, a method of a model's class: all steps of a call share one low copy (bf16 or fp16) of each weight. The steps are
    captured with dynamic sizes, because the KV cache grows at each step."""

    @functools.wraps(generate)
    def generate_with_kept_copies(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        session: Session | None = self.__dict__.get(SESSION)
        if session is None:
            return generate(self, *args, **kwargs)
        with session.cache.frozen(session.weight_names, "generate()", everywhere=False), session.generates(args, kwargs):
            return generate(self, *args, **kwargs)

    return generate_with_kept_copies


def wrap(model: nn.Module, options: Options, face: type[RewrittenBase] = RewrittenBase, kind: type[Session] = Session) -> Any:
    """Return a rewritten clone of a plain model, with the public methods of the class `face`. Nothing is captured yet.

    The clone gets one session, of the class `kind`. This session runs all calls, even of submodules that were rewritten before. Raises
    PolicyError if the model's class derives from the class of a rewritten module, CaptureError for a TorchScript module.
    """
    _refuse_class(model)
    return _made_over(clone_of(model), options, face, kind)


def _made_over(model: nn.Module, options: Options, face: type[RewrittenBase], kind: type[Session]) -> Any:
    """Rewrite `model` in place, and return it. `model` must be a new clone or copy, which no user holds. Other arguments: as for `wrap`."""
    cls = type(model)
    model.__class__ = subclass_of(face, cls)
    _take_over(model, cls, kind(options, model))
    return model


@contextmanager
def put_back_on_error(model: nn.Module) -> Iterator[None]:
    """Context manager for a rewrite in place. On an error, restore `model`. On success, end the session of an earlier rewrite."""
    before, old = Before(model), model.__dict__.get(SESSION)
    try:
        yield
    except BaseException:
        failed = model.__dict__.get(SESSION)
        before.put_back(model)
        _retire(failed, model)
        raise
    _retire(old, model)


def _retire(session: Session | None, model: nn.Module) -> None:
    """If `session` no longer runs the calls of `model`, end the checks by which `session` skips optimizer steps."""
    if session is not None and model.__dict__.get(SESSION) is not session:
        session.training.gate.retire()


def wrap_in_place(model: nn.Module, options: Options, face: type[RewrittenBase]) -> Any:
    """Rewrite `model` itself, and return it with the public methods of the class `face`. An earlier rewrite of `model` is undone first.

    Raises as `wrap` does, and PolicyError if the model is frozen.
    """
    refuse_frozen(model, "rewriting it")
    if is_rewritten(model):
        _make_plain(model)
    _refuse_class(model)
    cls, before = type(model), Before(model)
    before.set_aside()
    model.__class__ = subclass_of(face, cls)
    session = Session(options, model)
    model.__dict__[BEFORE] = before
    _take_over(model, cls, session)
    return model


def unwrap_in_place(model: nn.Module) -> None:
    """Turn a rewritten model back into the model before the rewrite, in place.

    Raises PlanError if it was never rewritten, PolicyError if it is frozen, CaptureError if `fully_shard` was applied after the rewrite.
    """
    session = session_of(model)
    refuse_frozen(model, "restoring it")
    _make_plain(model)
    _retire(session, model)


def _make_plain(model: nn.Module) -> None:
    """Remove the rewrite from `model`, in place. Raises CaptureError if `fully_shard` was applied to `model` after the rewrite."""
    session = session_of(model)
    if original_of(type(model)) is None:
        raise CaptureError(
            f"{type(model).__name__} went through fully_shard after the rewrite, and its class builds on the rewritten one; restore the "
            "model before fully_shard, or load its state_dict into a plain model"
        )
    session.cache.clear()
    before: Before | None = model.__dict__.get(BEFORE)
    if before is not None:
        before.put_back(model)
        return
    for module in model.modules():
        module.__dict__.pop("_compiled_call_impl", None)  # `model` is a rewritten clone, where only the rewrite sets this attribute
    _unwrap(model)


def _refuse_class(model: nn.Module) -> None:
    """Raise PolicyError if a user derived the class of `model` from a rewritten class, CaptureError for a TorchScript module."""
    cls = type(model)
    if issubclass(cls, RewrittenBase):
        raise PolicyError(
            f"{cls.__name__} derives from the class of a rewritten module; derive it from the original class, "
            "type(model) of the model before the rewrite"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError("a TorchScript module hides its Python code from capture; rewrite the model it was made from")


def _take_over(amp: nn.Module, cls: type[nn.Module], session: Session) -> None:
    """Redirect calls of `amp` and its submodules to `session`, which runs captured graphs. `cls` is the class of `amp` before the rewrite.

    If parts of `amp` are captured separately, only calls of `amp`, of these parts and of their submodules are redirected.
    """
    amp.__dict__[SESSION] = session
    parts = part_paths(amp, session.options.granularity)
    _add_entry(session, "", amp, cls, captured=not parts)
    known: WeakValueDictionary[int, nn.Module] = WeakValueDictionary({id(amp): amp})
    for path, module in _modules_not_in(known, amp, session):
        if is_rewritten(module):
            _unwrap(module)
        if path in parts:
            _add_entry(session, path, module, type(module), captured=True)
            module.__dict__["forward"] = PartForward(session, path, module)
            module.__dict__[REPLICATE] = PartReplicas(session, module)
        elif not parts or _is_inside(path, parts):
            call_as_part(session, path, module)
    session.take_in, session.plain = lambda: _take_in(session, parts, known), lambda: plain_of(amp)


def _modules_not_in(known: WeakValueDictionary[int, nn.Module], amp: nn.Module, session: Session) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) for each module of `amp` that is not in `known`, and add the module to `known`.

    TorchScript modules are not yielded: the session lists them as modules that cannot be captured.
    """
    scripted = ""
    for path, module in named_modules_in(amp):
        if known.get(id(module)) is module:
            continue
        known[id(module)] = module
        if not isinstance(module, torch.jit.ScriptModule):
            yield path, module
        elif not scripted or not path.startswith(scripted):
            scripted = f"{path}."
            session.cannot_read(path, "a TorchScript module hides its Python code; put in the module it was made from")


def _take_in(session: Session, parts: tuple[str, ...], known: WeakValueDictionary[int, nn.Module]) -> None:
    """Redirect calls of modules that were added to the model after the rewrite, such as a new head, to `session`.

    `parts` are the paths of the submodules that are captured separately; () if the model is captured whole. `known` are the modules seen
    before. If there are parts, a new module outside of them that has parameters is listed as a module that cannot be captured.
    """
    for path, module in _modules_not_in(known, session.root, session):
        if module._compiled_call_impl is not None or is_rewritten(module):
            continue  # the user compiled or rewrote this module separately
        if not parts or _is_inside(path, parts):
            call_as_part(session, path, module)
        elif next(nn.Module.named_parameters(module, recurse=False), None) is not None:
            session.cannot_read(path, "it was put in after the rewrite, which chose the parts of granularity=; rewrite the model again")


def _is_inside(path: str, parts: tuple[str, ...]) -> bool:
    return path.startswith(tuple(f"{part}." for part in parts))


def _add_entry(session: Session, path: str, module: nn.Module, cls: type[nn.Module], captured: bool) -> None:
    """Let calls of `module` run rewritten graphs through `session`. `cls` is the class of `module` before the rewrite.

    If a forward was set on the instance, for instance by accelerate, that forward is captured, and is stored as the attribute FORWARD.
    """
    own_forward: Callable[..., Any] | None = module.__dict__.pop("forward", None)
    if own_forward is None:
        session.add_entry(path, cls.forward.__get__(module), captured, home=cls)
        return
    module.__dict__[FORWARD] = own_forward
    session.add_entry(path, own_forward, captured)


def capture_now(amp: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Call a rewritten model once, so that its graphs are captured. Buffers, inputs and random states are restored afterwards."""
    with state_kept(amp, (args, kwargs)):
        amp(*args, **kwargs)
