"""Run calls of a submodule of a rewritten model: direct calls, such as `amp.encoder(x)`, and calls of parts that are captured separately.

If a recurrent module is called on a packed sequence, only its layer op (such as `torch.lstm`) is captured, not the module's Python code.
The module reads the number of sequences from the values of a tensor, to make and check states. Dynamo cannot capture this. So the module
runs as written until it calls the layer. That call runs a captured graph, whose inputs are the packed rows, the batch sizes and the states.

torch.nn.DataParallel makes a replica for each device, and calls each replica in a thread:

1. `torch.nn.parallel.replicate` copies the parameters to each device, asks each module for a replica, and gives the copies to the replica.
2. A call of a replica calls the model itself, with the tensors of the replica in place of parameters and buffers. So all replicas have
   one session: one plan, one loss scale, one set of guarded optimizers. Low copies are made of the replica's tensors, on its device.
3. Only one replica runs at a time, because the model can hold the tensors of only one replica. But a GPU still computes for a replica
   while the host calls the next one.
4. The graphs return unscaled fp32 gradients, and PyTorch adds them on the first device. If the gradient of one replica overflows, so does
   the sum, and the optimizer step is skipped for all.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from amprewrite.graphs.fx.run.recurrent_layers import LAYERS, is_packed_call
from amprewrite.runtime.ambient.hook_watch import call_with_own_hooks
from amprewrite.runtime.compiler.dynamo import kept_out, never_read, with_own_code
from amprewrite.runtime.compiler.plain_words import DISABLE_REASON
from amprewrite.runtime.session import Session, enter
from amprewrite.runtime.weights.freezing import refuse_frozen

FORWARD = "_amprewrite_forward"
"""Name of the attribute that keeps a `forward` that was set on the instance before the rewrite."""


def copies_itself(cls: type[nn.Module]) -> bool:
    """True if the class `cls` defines how its instances are copied or pickled, by a method such as `__getstate__`, as nn.LSTM does."""
    methods = ("__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__")
    return any(getattr(cls, name, None) is not getattr(nn.Module, name, None) for name in methods)


def call_as_part(session: Session, path: str, module: nn.Module) -> None:
    """Redirect calls of `module`, which is at `path` in a rewritten model, to `session`, which runs captured graphs."""
    module._compiled_call_impl = part_call(session, path, module)
    module.__dict__[REPLICATE] = PartReplicas(session, module)


class PartForward:
    """The forward of a part: a submodule that is captured separately. Hooks on the part, such as FSDP2's, run outside of its graph."""

    def __init__(self, session: Session, path: str, part: nn.Module) -> None:
        self.session, self.path, self.part = session, path, part

    def __reduce__(self) -> Any:
        """If the part alone is copied or pickled, give the copy the forward from before the rewrite: the copy is not rewritten."""
        own = self.part.__dict__.get(FORWARD)
        return (getattr, (self.part, "forward")) if own is None else (functools.partial, (own,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.part, nn.RNNBase) and is_packed(args, kwargs):
            forward = self.part.__dict__.get(FORWARD) or type(self.part).forward.__get__(self.part)
            return call_packed(self.session, self.path, self.part, forward, args, kwargs)
        return enter(self.session, self.path, args, kwargs)


class PartReplicas:
    """Callable that makes a replica of `part`, a submodule of a rewritten model, for torch.nn.DataParallel.

    In a deep copy of `part` alone, which is not rewritten, this callable has no session and makes plain replicas.
    """

    def __init__(self, session: Session | None, part: nn.Module) -> None:
        self.session, self.part = session, part

    def __reduce__(self) -> Any:
        return PartReplicas, (None, self.part)

    def __call__(self) -> Any:
        if self.session is None:
            return type(self.part)._replicate_for_data_parallel(self.part)
        return replica_of(self.session, self.part)


def part_call(session: Session, path: str, module: nn.Module) -> Callable[..., Any]:
    """Return the function that runs if the submodule at `path` is called, as in `amp.encoder(x)`.

    1. Inside a captured call of the whole model, Dynamo inlines the function and the module's code into the graph of the model.
       If the code around the call of the module runs as written because Dynamo cannot capture it, the function gets a graph of its own.
    2. In a direct call, the module runs graphs of its own. The same holds inside a call of the model while Dynamo is not active, for
       instance in a checkpoint around code that cannot be captured.
    3. A copy of the module has no such function, except if its class defines how instances are copied, as nn.LSTM does: then the function
       may be copied like any attribute. For such a class the function is a bound method. Its copy is bound to the copied module, and
       runs that module's code. pickle stores the module's own `_call_impl` instead of the function.
    """

    @torch.compiler.assume_constant_result  # type: ignore[misc]
    def inside() -> bool:
        return session.state.captured > 0 and not kept_out()

    never_read(inside)
    recurrent = isinstance(module, nn.RNNBase)

    @torch.compiler.disable(recursive=False, reason=DISABLE_REASON)  # type: ignore[misc]
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
        if entry is None or entry.function is not call_part:  # there is no entry yet, or the entry is for an earlier module at `path`
            session.add_entry(path, call_part)
        return enter(session, path, args, kwargs)

    def call_recurrent(*args: Any, **kwargs: Any) -> Any:
        packed = is_packed(args, kwargs)
        return call_packed(session, path, module, module._call_impl, args, kwargs) if packed else call_alone(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if recurrent and is_packed(args, kwargs):
            return call_packed(session, path, module, module._call_impl, args, kwargs)
        if inside():
            if module._backward_hooks or module._backward_pre_hooks:
                return call_unread("capture cannot read the backward hooks on it; hook tensors or its parent instead", args, kwargs)
            return call_with_own_hooks(module, args, kwargs)
        return call_alone(*args, **kwargs)

    def call_own(called: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return made(*args, **kwargs) if called is module else called._call_impl(*args, **kwargs)

    alone = recurrent and session.runs_recurrent_eagerly
    made = call_recurrent if alone else with_own_code(call)
    own = torch.compiler.disable(call_own, reason=DISABLE_REASON) if alone else with_own_code(call_own)
    own.__name__ = "_call_impl"  # pickle looks the bound method up by this name
    return types.MethodType(own, module) if alone or copies_itself(type(module)) else made


def is_packed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the input of a call of a recurrent module is a packed sequence."""
    return isinstance(args[0] if args else kwargs.get("input"), PackedSequence)


class _Layers(TorchFunctionMode):
    """Mode in which a call of a layer op such as `torch.lstm` on a packed sequence calls `run(op, rows, batch sizes, states)` instead."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in LAYERS and is_packed_call(args):
            return self.run(func, *args[:3])
        return func(*args, **(kwargs or {}))


@torch.compiler.disable(reason=DISABLE_REASON)  # type: ignore[misc]
def call_packed(
    session: Session, path: str, module: nn.RNNBase, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the result of `function` on a packed sequence. Only its layer op, such as `torch.lstm`, runs as a captured graph.

    `function` is the forward of the recurrent `module` at `path`, with or without its hooks. `args` and `kwargs` are its arguments.
    """
    key = f"{path} packed"
    entry = session.entries.get(key)
    if entry is None or getattr(entry.function, "__self__", None) is not module:  # no entry yet, or one of an earlier module at `path`
        session.add_entry(path, types.MethodType(_layer_alone, module), key=key)
    with _Layers(lambda *given: enter(session, key, given, {})):
        return function(*args, **kwargs)


def _layer_alone(module: nn.RNNBase, layer: Callable[..., Any], rows: Tensor, batch_sizes: Tensor, states: Any) -> Any:
    """Call the op `layer` on packed rows with the weights of the recurrent `module`."""
    weights = [getattr(module, name) for name in module._flat_weights_names]
    sizes = module.bias, module.num_layers, module.dropout, module.training, module.bidirectional
    return layer(rows, batch_sizes, states, weights, *sizes)


REPLICATE = "_replicate_for_data_parallel"


def replica_of(session: Session, module: nn.Module) -> nn.Module:
    """Return a replica of `module`, a rewritten model or a part of it, for torch.nn.parallel.replicate.

    Raises PolicyError if the model is frozen.
    """
    refuse_frozen(module, "replicating it")
    session.training.gate.knows_optimizer()  # search for optimizers now: in the replica's call the model has tensors that no optimizer owns
    replica: nn.Module = nn.Module._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]
    replica.__dict__["_compiled_call_impl"] = _ReplicaCall(session, module, replica)
    return replica


class _ReplicaCall:
    """The call of a replica: it calls `module` with the tensors of the replica. Hooks run once, in the call of `module`."""

    def __init__(self, session: Session, module: nn.Module, replica: nn.Module) -> None:
        self.session, self.module = session, module
        self.replica = weakref.ref(replica)  # weak: a reference cycle would keep the replica's tensors until the next garbage collection

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        replica = self.replica()
        assert replica is not None
        with self.session.turn:
            return functional_call(self.module, dict(_tensors_of(replica)), args, kwargs)


def _tensors_of(replica: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of the parameters and buffers that torch.nn.parallel.replicate gave a replica."""
    for path, module in nn.Module.named_modules(replica):
        for name, tensor in (*module._former_parameters.items(), *module._buffers.items()):  # type: ignore[union-attr, operator]
            if tensor is not None:
                yield f"{path}.{name}".lstrip("."), tensor
