"""Check whether capture itself, before any rounding, changed the values that a model computes.

Some models test whether they are compiled, and then compute other values. So in fp16 and under `strict=True`, the first call is compared
with the original model, both in fp32:

1. Before the call, copy its inputs, the buffers and the random states.
2. After the call, run the captured graph in fp32, and a clone of the original model on the copies. Each floating result of the clone must
   equal a result or an input of the graph. If one does not, run the graph again, and find its first op whose result no op of the clone has.

The check is skipped if its answer would be uncertain, or if a side effect would happen twice:

1. several ranks train, or an argument of the call is neither a tensor nor plain data;
2. the call ran several graphs, or code around graphs; or the graph writes inputs other than buffers;
3. the captured code changes existing objects or hooks a tensor: Dynamo does both only after the graph has run;
4. two runs of the original model differ, or the first op that differs draws random numbers.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import numpy as np
import torch
import torch.fx
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amprewrite.graphs.fx.node_facts import differentiates, is_batched, kept_meta, written_inputs, written_memory
from amprewrite.graphs.fx.read.aliasing import note_memory
from amprewrite.graphs.fx.read.names import source_of
from amprewrite.graphs.fx.uncaptured import closed_if_raised, unhooked
from amprewrite.graphs.log_quiet import Quiet, loggers_of
from amprewrite.runtime.ambient.kept_state import random_state_kept
from amprewrite.runtime.compiler import dynamo
from amprewrite.runtime.options import several_ranks
from amprewrite.tables.boundary.members import buffers_in, parameters_in
from amprewrite.torch_internals.dispatch import is_traceable_wrapper_subclass
from amprewrite.torch_internals.trees import tree_leaves, tree_map

TOLERANCE = 1e-4
"""Relative L2 distance above which two fp32 results count as different: about a tenth of bf16's rounding error."""
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
"""Types of plain data, which a copy of the arguments shares with the original."""
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError)
"""Errors that code of a model may raise because it cannot run on copies."""


def relative_error(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the relative L2 error of `got` against `exact`, over all tensors together; inf if their lists of shapes differ.

    Equal infinities, and NaN in both, are no error. Any other non-finite difference gives inf. If `exact` is all 0, any error gives inf.
    """
    if [each.shape for each in got] != [each.shape for each in exact]:
        return math.inf
    difference = size = 0.0
    for a, b in zip(got, exact, strict=True):
        a, b = a.detach().double(), b.detach().double()
        same = (a == b) | (a.isnan() & b.isnan())
        difference += torch.where(same, 0, a - b).square().sum().item()
        size += torch.where(b.isfinite(), b, 0).square().sum().item()
    if difference == 0:
        return 0.0
    return math.sqrt(difference / size) if size and math.isfinite(difference) else math.inf


def floats(value: Any) -> list[Tensor]:
    """Return the dense floating tensors in a result, and complex ones as real tensors with a last dim of size 2.

    Batched tensors inside a vmap are left out, since their values cannot be read.
    """
    tensors = (t for t in tree_leaves(value) if isinstance(t, Tensor) and t.layout == torch.strided and not is_batched(t))
    real = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors)
    return [t for t in real if t.is_floating_point()]


def results_of(value: Any) -> list[Tensor]:
    """Return the dense floating tensors in a result, including tensors in attributes of objects, up to four levels deep."""

    def inside(part: Any, depth: int) -> Iterator[Tensor]:
        for leaf in tree_leaves(dict(part) if isinstance(part, dict) else part):
            if isinstance(leaf, Tensor):
                yield from floats(leaf)
            elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module) and depth < 4:
                yield from inside(vars(leaf), depth + 1)

    return list(inside(value, 0))


def furthest(wanted: Iterable[Tensor], had: Sequence[Tensor]) -> float:
    """For each tensor in `wanted`, take the relative error of the nearest tensor in `had`. Return the largest of these errors.

    The result is 0 if `wanted` is empty or all its tensors are in `had`, and inf if a tensor of `wanted` has a shape that `had` lacks.
    """
    return max((min((relative_error([each], [a]) for each in had), default=math.inf) for a in wanted), default=0.0)


class Values(TorchDispatchMode):
    """A dispatch mode that records, for each tensor that an op returns, the four numbers that `_sketch` computes.

    With these numbers, `_FirstUnseen` finds the first op of another run whose result no op of the recorded run returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(result)
        return result

    def add(self, value: Any) -> None:
        """Record the tensors in `value`, as if an op of the recorded run had returned them."""
        for tensor in _sketchable(value):
            self.seen[_kind(tensor)].append(_sketch(tensor))

    def had(self, value: Any) -> bool:
        """True if each tensor in `value` equals a recorded tensor, up to TOLERANCE."""
        found = ((_sketch(tensor), self.seen.get(_kind(tensor), ())) for tensor in _sketchable(value))
        return all(any(_alike(mine, each) for each in seen) for mine, seen in found)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype


def _sketchable(value: Any) -> list[Tensor]:
    """Return the tensors in `value` whose elements `_sketch` can read: dense, not quantized, and not on the meta device."""
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.layout == torch.strided and not t.is_meta and not t.is_quantized]


def _sketch(tensor: Tensor) -> Tensor:
    """Return four fp64 numbers by which equal results are recognised.

    They are the sum of magnitudes, two weighted sums that depend on the order of elements, and the count of non-finite elements.
    """
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        flat = (flat.abs() if flat.is_complex() else flat).double()
        finite = torch.where(flat.isfinite(), flat, 0)
        place = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float64)
        sums = [finite.abs().sum(), (finite * (place * 1.7).sin()).sum(), (finite * (place * 0.37).cos()).sum()]
        return torch.stack([*sums, (~flat.isfinite()).sum().double()])


def _alike(a: Tensor, b: Tensor) -> bool:
    """True if two results of `_sketch` differ by at most TOLERANCE times the sum of magnitudes, so that their tensors count as equal."""
    room = TOLERANCE * float(torch.maximum(a[0], b[0]))
    return bool(((a - b).abs() <= room).all())


class _FirstUnseen(torch.fx.Interpreter):
    """Runs a captured graph, and finds the first op whose result is not among the recorded `values` of another run."""

    def __init__(self, module: torch.fx.GraphModule, graph: torch.fx.Graph, values: Values, devices: Sequence[int]) -> None:
        super().__init__(module, graph=graph)
        self.values, self.devices = values, devices
        self.found: torch.fx.Node | None = None
        self.drew = False
        """True if the found op draws random numbers."""

    def run_node(self, n: torch.fx.Node) -> Any:
        if self.found is not None or not n.op.startswith("call"):
            return super().run_node(n)
        before = self._generators()
        result = super().run_node(n)
        if not self.values.had(result):
            self.found, self.drew = n, not all(map(torch.equal, before, self._generators()))
        return result

    def _generators(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(each) for each in self.devices)]


def random_states(devices: Sequence[int]) -> Callable[[], None]:
    """Return a function that sets random generators back to the states that they have now.

    The generators are all that a model may use: of Python, of NumPy, and of PyTorch on the CPU and the CUDA `devices`.
    """
    python, of_numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = {each: torch.cuda.get_rng_state(each) for each in devices}

    def set_back() -> None:
        random.setstate(python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(cpu)
        for device, state in cuda.items():
            torch.cuda.set_rng_state(state, device)

    return set_back


def copied(leaf: Any) -> Any:
    """Return a copy of an argument, with the same `requires_grad`; values that are no tensors are returned unchanged.

    The copy of a non-leaf of autograd is no leaf, so the model may write to it: PyTorch forbids writes to leaves that require gradients.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    made = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return made if leaf.is_leaf else made.clone()


def _is_dense(tensor: Tensor) -> bool:
    dense = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_nested)
    return dense and type(tensor) in (Tensor, nn.Parameter) and not is_traceable_wrapper_subclass(tensor)


def can_be_checked(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a call of `root` with these arguments can be repeated on copies, and no other ranks take part.

    The arguments must be plain data or dense tensors, and the tensors of `root` must be dense. Tensors on the meta device are refused.
    """
    given = (_is_dense(each) if isinstance(each, Tensor) else isinstance(each, _PLAIN) for each in tree_leaves((args, kwargs)))
    return not several_ranks() and all(given) and all(map(_is_dense, (*parameters_in(root), *buffers_in(root))))


class CaptureCheck:
    """Compares a call that captures a model with the same call of the original model.

    Create it before the call, with the arguments of the call. `plain` returns an unrewritten clone of `root` with the same parameters.
    """

    def __init__(self, root: nn.Module, plain: Callable[[], nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.plain = plain
        self.args, self.kwargs = tree_map(copied, (args, kwargs))
        self.buffers = {id(buffer): (buffer, buffer.detach().clone()) for buffer in buffers_in(root)}
        self.devices = sorted({t.device.index or 0 for t in (*parameters_in(root), *buffers_in(root)) if t.device.type == "cuda"})
        self.random, self.grad = random_states(self.devices), torch.is_grad_enabled()
        self.graph: torch.fx.Graph | None = None
        self.module: torch.fx.GraphModule | None = None
        self.given: tuple[Any, ...] = ()
        self.written: Set[int] = frozenset()
        self.differentiates = False
        self.sound = True

    def captures(self, module: torch.fx.GraphModule) -> None:
        """Record `module`, the graph that Dynamo is capturing for the checked call of the model.

        If the call has a second graph, or the captured code changes existing objects or hooks a tensor, nothing is compared."""
        self.sound = self.sound and self.graph is None and not dynamo.changes_objects()
        if written_memory(module.graph):
            note_memory(module.graph)  # in eager code `dropout(x, 0.0)` is `x`, so a write to its result changes `x`: record such aliases
        # read these facts from `module`: the copy of its graph that is made below lacks the subgraphs
        self.written, self.differentiates = written_inputs(module.graph), differentiates(module.graph)
        self.graph, self.module = torch.fx.Graph(), module
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        self.graph.output(self.graph.graph_copy(module.graph, copies))
        for node, copy in copies.items():
            copy.meta = kept_meta(node.meta)

    def runs(self, inputs: tuple[Any, ...]) -> None:
        """Record `inputs`, on which the checked call is about to run the captured graph. For a buffer, record its value before the call."""
        if not self.sound or self.graph is None or self.given:
            return
        self.sound = all(id(inputs[place]) in self.buffers for place in self.written)
        self.given = tuple(self.buffers[id(each)][1] if id(each) in self.buffers else each for each in inputs)

    def parted(self) -> tuple[float, str] | None:
        """Return (relative distance of the fp32 results, first op that differs) if the captured graph computes other values than the model.

        Returns None if the results are the same, or if they cannot be compared. Use this method after the checked call has returned.
        """
        if not self.sound or self.graph is None or not self.given:
            return None
        try:
            had = results_of((self._captured(torch.fx.Interpreter(self.module, graph=self.graph)), self.given))  # type: ignore[arg-type]
            if self._is_had(had):
                return None
            values = Values()
            wanted, again = self._as_written(self.grad, values), self._as_written(self.grad)
            far = furthest(wanted, had)
            if far <= TOLERANCE or furthest(wanted, again) > TOLERANCE:
                return None
            values.add(self.given)
            search = _FirstUnseen(self.module, self.graph, values, self.devices)  # type: ignore[arg-type]
            self._captured(search)
        except _FAILURES:
            return None  # the model or the captured graph cannot run on copies of the inputs, so there is nothing to compare
        if search.found is None or search.drew:
            return None
        source = source_of(search.found.stack_trace)
        return far, f"{search.found.name}{f' ({source})' if source else ''}"

    def _is_had(self, had: Sequence[Tensor]) -> bool:
        """True if all results of the original model are among `had`, the results and inputs of the captured graph.

        The model runs without gradients, which saves memory. The result is False if the model raises in this mode.
        """
        try:
            return furthest(self._as_written(False), had) <= TOLERANCE
        except _FAILURES:
            return False

    @contextlib.contextmanager
    def _again(self, grad: bool) -> Iterator[None]:
        """Context manager to repeat the checked call: set its random states and the grad mode `grad`, and disable saved-tensor hooks."""
        now = random_states(self.devices)
        with random_state_kept(self.devices), unhooked(), torch.set_grad_enabled(grad):
            self.random()
            try:
                yield
            finally:
                now()

    def _as_written(self, grad: bool, values: Values | None = None) -> list[Tensor]:
        """Run the original model on copies of the arguments and buffers, with the random states of the call. Return its floating results.

        `grad`: grad mode of the run. `values`, if given, records the result of every op.
        """
        plain = self.plain()
        copies = {key: start.clone() for key, (_, start) in self.buffers.items()}
        for module in plain.modules():
            module._buffers.update({name: copies.get(id(each), each) for name, each in module._buffers.items() if each is not None})
        args, kwargs = tree_map(copied, (self.args, self.kwargs))
        with Quiet(*loggers_of(plain)), self._again(grad), values or contextlib.nullcontext():
            return [each.detach() for each in results_of(plain.forward(*args, **kwargs))]

    def _captured(self, interpreter: torch.fx.Interpreter) -> Any:
        """Run the captured graph in fp32 by `interpreter`, and return its results. Inputs are detached, and written inputs are copied."""
        assert self.graph is not None
        grad = self.differentiates and self.grad
        given = list(self.given)
        for place, each in enumerate(given):
            if isinstance(each, Tensor):
                each = each.detach().clone() if place in self.written else each.detach()
                given[place] = each.requires_grad_(grad and self.given[place].requires_grad)
        with closed_if_raised(), self._again(grad):
            return interpreter.run(*given)
