"""While Dynamo captures a model, make functions such as `torch.is_autocast_enabled` report that autocast is on, with the dtype fp32.

Models switch autocast off where a low format would harm. Many do so only if autocast is on: otherwise `maybe_autocast(enabled=False)` of
transformers does nothing. If autocast is reported on, these models enter their regions without autocast, and the captured graph shows
the regions. The reported dtype is fp32, so that a cast to this dtype in the model's code changes no value.

1. Only the answers during capture change. autocast itself stays off: otherwise it would widen half values, refuse ops such as
   `binary_cross_entropy`, cost time in each call, and be seen by hooks, checkpoints and other code around the graphs. That code computes
   in fp32 in any case.
2. The true answer is given inside an autocast region that the model itself entered, and for a device that the model is not on.
3. The true answer is given to PyTorch's own code, which asks in order to choose kernels or, in `custom_fwd`, to convert inputs.
4. A region that code enters with these answers, as in `torch.autocast(device, enabled=torch.is_autocast_enabled(device))`, is left out of
   the graph: under torch.autocast it would change nothing.
5. The true answer is given to a model that holds half values or gets half inputs. Such a model asks whether autocast will make dtypes
   agree. Autocast will not, because it is off. If only inputs are half, the call starts again with these inputs in fp32 (`Widened`).

Exporters run the model's code without Dynamo's answers, so autocast is really switched on around them, for fp32. It would widen half values
that the code computes itself, so such code is exported without autocast (`exported_under_autocast`).

By default Dynamo calls these functions during capture, and treats the answers as constants. While it converts a frame, our own handlers
give the answers (`handling`). The context managers of this file change Dynamo for all threads, so they need Dynamo's lock (`dynamo.py`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch._dynamo.utils import proxy_args_kwargs
from torch._dynamo.variables import ConstantVariable, builder
from torch._dynamo.variables import torch as torch_functions
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.ctx_manager import AutocastModeVariable, NullContextVariable
from torch._dynamo.variables.functions import SkipFunctionVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx.experimental.symbolic_shapes import DimDynamic

from amprewrite.graphs.fx.run.recurrent_layers import LAYERS, in_one_step
from amprewrite.runtime.compiler.dynamo_failures import Unseen
from amprewrite.runtime.weights.half_values import TwoDtypes, is_half
from amprewrite.tables.boundary.members import buffers_in, parameters_in
from amprewrite.tables.errors import CaptureError
from amprewrite.torch_internals.dispatch import is_any_autocast_enabled
from amprewrite.torch_internals.dynamo import Unsupported

T = TypeVar("T")


def regions_around() -> int:
    """Return the number of nested torch.autocast regions that this thread is in, enabled or not."""
    around: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return around


@contextlib.contextmanager
def reporting_autocast_on(root: nn.Module, inputs: Any, around: int, again: bool) -> Iterator[None]:
    """Context manager in which Dynamo captures code as if autocast were on: `torch.is_autocast_enabled` and similar functions return True.

    They return the true answer to PyTorch's own code, inside an autocast region of the model, and for a device that the model is not on.
    If the model `root` or `inputs` (local variables of the captured function) hold fp16 or bf16 tensors, all code gets the true answer.
    But if `again` is True, the functions then raise Unseen(TwoDtypes()), and the call starts again with its half inputs in fp32.
    `around`: number of autocast regions around the call of the model.
    """
    devices, said = _devices(root, inputs), list[Any]()

    def heard(device: str) -> bool:
        return device in devices and regions_around() == around

    def answer(asked: Callable[..., Any], told: bool | torch.dtype, default: str) -> Callable[..., Any]:
        def handle(_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            if again:
                raise Unseen(TwoDtypes())
            given = [each.as_python_constant() for each in (*args, *kwargs.values())]
            device = str(given[0]) if given else default
            if not heard(device):
                return ConstantVariable.create(asked(*given))
            said.append(ConstantVariable(asked(*given) if _is_of_torch(tx) else told))
            return said[-1]

        return handle

    def region(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        answers = [each.value for each in (*args, *kwargs.values()) if any(each is one for one in said)]
        dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
        made = enter(function, args, kwargs)  # `enter` removes all entries of `kwargs`, so they are read above
        enabled, own = made.target_values[2], dtype is not None and dtype.as_python_constant() not in (None, *answers)
        return NullContextVariable() if answers and (not own if enabled else enabled in answers) else made

    answers: dict[Any, Callable[..., Any]] = {
        torch.is_autocast_enabled: answer(torch.is_autocast_enabled, True, "cuda"),
        torch.is_autocast_cpu_enabled: answer(torch.is_autocast_cpu_enabled, True, "cpu"),
        torch.get_autocast_dtype: answer(torch.get_autocast_dtype, torch.float32, "cuda"),
        torch.get_autocast_gpu_dtype: answer(torch.get_autocast_gpu_dtype, torch.float32, "cuda"),
        torch.get_autocast_cpu_dtype: answer(torch.get_autocast_cpu_dtype, torch.float32, "cpu"),
        is_any_autocast_enabled: answer(is_any_autocast_enabled, True, min(devices, default="")),
    }
    enter = AutocastModeVariable.create
    with handling(answers), replaced(AutocastModeVariable, "create", staticmethod(region)):
        yield


def _is_of_torch(tx: Any) -> bool:
    """True if the code that Dynamo is reading is PyTorch's own. `tx`: the InstructionTranslator that reads it."""
    return str(tx.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def exported_under_autocast(
    root: nn.Module, inputs: Any, export: Callable[[], T], computes_half: Callable[[T], bool] = lambda _: False
) -> T:
    """Return the result of `export()`, called under autocast with the dtype fp32 on the devices of the model `root` and its `inputs`.

    `export` is called without autocast if a parameter, buffer or input is fp16 or bf16. It is called again without autocast if
    `computes_half(result)` is true, or if it raised a CaptureError. So autocast never changes the dtype of a value. Devices such as "meta"
    have no autocast.
    """
    devices, found = set(filter(torch.amp.is_autocast_available, _devices(root, inputs))), None
    if devices:
        with contextlib.suppress(CaptureError), _autocast_for_fp32(devices):
            found = export()
    return export() if found is None or computes_half(found) else found


@contextlib.contextmanager
def _autocast_for_fp32(devices: set[str]) -> Iterator[None]:
    before = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in sorted(devices)]
    try:
        for device, _, _ in before:
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, torch.float32)
        yield
    finally:
        for device, enabled, dtype in before:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


def _devices(root: nn.Module, inputs: Any) -> set[str]:
    """Return the device types of all tensors of `root` and `inputs`, for which autocast is reported as on; {"cpu"} if there are no tensors.

    Return an empty set if a tensor is in half precision: then autocast is not reported as on, and the model is exported without autocast.
    """
    tensors = [*chain(parameters_in(root), buffers_in(root)), *_tensors(inputs)]
    return set() if any(map(is_half, tensors)) else {each.device.type for each in tensors} or {"cpu"}


def _tensors(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts, at most `depth` levels deep.

    Objects of other classes are not searched, because they may be incomplete.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each, depth - 1)


_FOLDED: dict[Any, Any] = torch_functions.constant_fold_functions  # type: ignore[assignment]
"""Functions that Dynamo evaluates as constants, before it looks for a handler."""


@contextlib.contextmanager
def handling(handlers: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Context manager in which Dynamo, to capture a call of a function `f`, runs the handler `handlers[f]` if there is one."""
    table = torch_functions.TorchInGraphFunctionVariable._get_handlers()
    folded, before = dict(_FOLDED), {each: table[each] for each in handlers if each in table}
    for function in handlers:
        _FOLDED.pop(function, None)
    table.update(handlers)
    try:
        yield
    finally:
        for function in handlers:
            table.pop(function, None)
        table.update(before)
        _FOLDED.update(folded)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context manager in which the attribute `name` of `owner` is `value`."""
    given = vars(owner).get(name, getattr(owner, name))  # `vars` returns a staticmethod object, which `getattr` would unwrap
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, given)


@contextlib.contextmanager
def sharing_sizes(shared: Callable[[Any], Iterable[int]]) -> Iterator[None]:
    """Context manager in which Dynamo gives one symbol to dynamic sizes that are equal. `shared(tensor)` returns the dims to compare.

    Dynamo guards that these sizes stay equal, and captures again if they differ. Dynamo has no public setting for this.
    """
    given: Callable[..., Any] = builder._automatic_dynamic

    def sizes_of(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        context = given(tensor, *args, **kwargs)
        for dim in shared(tensor):
            if context.dynamic_sizes[dim] is DimDynamic.DYNAMIC:
                context.dynamic_sizes[dim] = DimDynamic.DUCK
        return context

    with replaced(builder, "_automatic_dynamic", sizes_of):
        yield


@contextlib.contextmanager
def breaking_at_gradients() -> Iterator[None]:
    """Context manager in which Dynamo breaks the graph at a `torch.autograd.grad` that it refuses, and captures the code after the call.

    Compiled graphs lose the autograd edges between their results. So since torch 2.15 Dynamo runs the whole frame as written if code after
    the call reads a differentiable value of the graph. Use this context manager only for graphs that run eagerly: they keep these edges.
    """
    given = torch_functions.TorchInGraphFunctionVariable._get_handlers()[torch.autograd.grad]

    def handle(*args: Any, **kwargs: Any) -> Any:
        try:
            return given(*args, **kwargs)
        except Unsupported as refused:
            vars(refused).update(skip_frame=False, preserve_skip_frame_after_inline=False, apply_to_code=True)
            raise

    with handling({torch.autograd.grad: handle}):
        yield


@contextlib.contextmanager
def breaking_at_hooks() -> Iterator[None]:
    """Context manager in which Dynamo of torch 2.11 and 2.12 breaks the graph where code sets a hook on a tensor that it computed.

    PyTorch then sets the hook. A captured hook would be wrong: `x.contiguous()` may be `x` itself, and a captured hook on it would see only
    the gradients of this one use of `x`. Also, the first of two hooks would run last. In later versions, do nothing.
    """
    if find_spec("torch._higher_order_ops.register_hook") is not None:  # this version of torch captures such a hook as a separate op
        yield
        return
    given: Callable[..., Any] = TensorVariable._method_register_hook

    def handle(tensor: Any, *args: Any) -> Any:
        if not tensor.source:
            raise Unsupported("a hook on a tensor that the captured code computes")
        return given(tensor, *args)

    with replaced(TensorVariable, "_method_register_hook", handle):
        yield


@contextlib.contextmanager
def warnings_after_graphs() -> Iterator[None]:
    """Context manager in which a `warnings.warn` in PyTorch's own code breaks no graph. The warning is given after the graph has run.

    Otherwise Dynamo would break the graph there, and run the rest of PyTorch's function as written. For example, nn.MultiheadAttention
    warns if the dtypes of its masks differ, and would then run in fp32.
    """
    given: Callable[..., Any] = SkipFunctionVariable.call_function

    def handle(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if function.value is not warnings.warn or not _is_of_torch(tx):
            return given(function, tx, args, kwargs)
        # Leave out `stacklevel`: it counts stack frames, and these no longer exist when the warning is given, after the graph.
        said = [*args, *(kwargs[name] for name in ("message", "category") if name in kwargs)]
        tx.output.root_tx.debug_locals.append((function, said))
        return ConstantVariable.create(None)

    with replaced(SkipFunctionVariable, "call_function", handle):
        yield


@contextlib.contextmanager
def recurrent_layers_whole() -> Iterator[None]:
    """Context manager in which Dynamo records a call such as `torch.lstm` as one node, and infers result shapes from one time step."""

    def handle(layer: Callable[..., Any], _: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        proxy = tx.output.create_proxy("call_function", in_one_step(layer), *proxy_args_kwargs(args, kwargs))
        results = wrap_fx_proxy(tx, proxy)
        proxy.node.target = layer
        return results

    with handling({layer: partial(handle, layer) for layer in LAYERS}):
        yield
