"""Tell whether capture itself changed what a model computes, before anything is rounded.

Some models ask whether they are compiled, and then compute something else. So a first call that is looked at (fp16, `strict=True`) is
compared with the original model, both in fp32:

1. Before the call copy its inputs, the buffers and the random states.
2. After it run a clone of the plain model on those copies. If a floating result is no result of the captured graph, run that graph in fp32
   on what it was given, and find the first op whose values the plain model never had.

Nothing is compared where it could not be told, or where an effect would happen twice: if the call ran more than one graph or code between
graphs, if Dynamo replays writes to objects that were there before, if the graph writes anything but buffers, if an argument is no plain
data, if the plain model does not repeat itself, if the first op that parts draws random numbers, and where several ranks train.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.fx
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amprewrite.graphs.fx.node_facts import differentiates, kept_meta, written_inputs
from amprewrite.graphs.fx.read.source_text import source_of
from amprewrite.graphs.fx.uncaptured import closed_if_raised, unhooked
from amprewrite.graphs.log_quiet import Quiet
from amprewrite.runtime.ambient.kept_state import random_state_kept
from amprewrite.runtime.compiler import dynamo
from amprewrite.runtime.compiler.unlogged import loggers_of
from amprewrite.tables.boundary.members import buffers_in, parameters_in
from amprewrite.torch_internals.dispatch import is_traceable_wrapper_subclass
from amprewrite.torch_internals.trees import tree_leaves, tree_map

TOLERANCE = 1e-4
"""Relative L2 distance from which on two fp32 results are different results: a tenth of what bf16 rounds."""
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
"""Types of arguments that a copy shares."""
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError)
"""Errors by which code of a model says that it cannot run on copies."""


def distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance of two tensors of one shape; equal infinities and NaN are no distance."""
    a, b = a.detach().double(), b.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    size = torch.where(b.isfinite(), b, 0).norm().item()
    lost = torch.where(same, 0, a - b).norm().item()
    return 0.0 if lost == 0 else lost / size if size else float("inf")


def results_of(value: Any) -> list[Tensor]:
    """Dense floating tensors of a result, in objects that pytree does not know, too."""

    def inside(part: Any, depth: int) -> Iterator[Tensor]:
        for leaf in tree_leaves(dict(part) if isinstance(part, dict) else part):
            if isinstance(leaf, Tensor):
                if leaf.is_floating_point() and leaf.layout == torch.strided:
                    yield leaf
            elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module) and depth < 4:
                yield from inside(vars(leaf), depth + 1)

    return list(inside(value, 0))


def furthest(wanted: Iterable[Tensor], had: Sequence[Tensor]) -> float:
    """The largest distance of a wanted tensor from the nearest of those of its shape; 0 if all are there."""
    return max((min((distance(each, a) for each in had if each.shape == a.shape), default=float("inf")) for a in wanted), default=0.0)


class Values(TorchDispatchMode):
    """Notes what every op gives while it is on, in four numbers a tensor: enough to find the first op of another run that parts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(result)
        return result

    def add(self, value: Any) -> None:
        """Note that the run had the tensors in `value`."""
        for tensor in _sketchable(value):
            self.seen[_kind(tensor)].append(_sketch(tensor))

    def had(self, value: Any) -> bool:
        """Whether the run had all tensors in `value`."""
        found = ((_sketch(tensor), self.seen.get(_kind(tensor), ())) for tensor in _sketchable(value))
        return all(any(_alike(mine, each) for each in seen) for mine, seen in found)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype


def _sketchable(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.layout == torch.strided and not t.is_meta and not t.is_quantized]


def _sketch(tensor: Tensor) -> Tensor:
    """The sum of magnitudes, two weighted sums that tell orders apart, and how many numbers are not finite."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        flat = (flat.abs() if flat.is_complex() else flat).double()
        finite = torch.where(flat.isfinite(), flat, 0)
        place = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float64)
        sums = [finite.abs().sum(), (finite * (place * 1.7).sin()).sum(), (finite * (place * 0.37).cos()).sum()]
        return torch.stack([*sums, (~flat.isfinite()).sum().double()])


def _alike(a: Tensor, b: Tensor) -> bool:
    room = TOLERANCE * float(torch.maximum(a[0], b[0]))
    return bool(((a - b).abs() <= room).all())


class _FirstUnseen(torch.fx.Interpreter):
    """Runs a captured graph, and finds the first op whose result another run did not have."""

    def __init__(self, module: torch.fx.GraphModule, graph: torch.fx.Graph, values: Values, devices: Sequence[int]) -> None:
        super().__init__(module, graph=graph)
        self.values, self.devices = values, devices
        self.found: torch.fx.Node | None = None
        self.drew = False
        """Whether that op draws random numbers."""

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


@dataclass(frozen=True)
class Random:
    """The states of all generators that a model may draw from."""

    python: Any
    numpy: Any
    torch: Tensor
    devices: dict[int, Tensor]

    @classmethod
    def now(cls, devices: Sequence[int]) -> Random:
        there = {each: torch.cuda.get_rng_state(each) for each in devices}
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), there)

    def set(self) -> None:
        """Have all generators go on from here."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        for device, state in self.devices.items():
            torch.cuda.set_rng_state(state, device)


@contextlib.contextmanager
def _from(start: Random) -> Iterator[None]:
    """Draw as from `start`; afterwards all generators are where they were."""
    now = Random.now(tuple(start.devices))
    with random_state_kept(tuple(start.devices)):
        start.set()
        try:
            yield
        finally:
            now.set()


def copied(leaf: Any) -> Any:
    """A copy of an argument that wants a gradient if it does, no leaf if it is none: PyTorch forbids writes to leaves that want one."""
    if not isinstance(leaf, Tensor):
        return leaf
    made = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return made if leaf.is_leaf else made.clone()


def can_be_copied(value: Any) -> bool:
    """Whether arguments are dense tensors with values and plain data throughout."""
    return all(_is_dense(each) if isinstance(each, Tensor) else isinstance(each, _PLAIN) for each in tree_leaves(value))


def _is_dense(tensor: Tensor) -> bool:
    dense = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_nested)
    return dense and type(tensor) in (Tensor, nn.Parameter) and not is_traceable_wrapper_subclass(tensor)


def _several_ranks() -> bool:
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def can_be_checked(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `root` with these arguments can be made once more on copies."""
    held = (*parameters_in(root), *buffers_in(root))
    return not _several_ranks() and can_be_copied((args, kwargs)) and all(_is_dense(each) for each in held)


class CaptureCheck:
    """One call of a model that captures, and the same call on the original model.

    `plain` makes a clone of the module that is called, without any rewrite, with the same parameters.
    """

    def __init__(self, root: nn.Module, plain: Callable[[], nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.plain = plain
        self.args, self.kwargs = tree_map(copied, (args, kwargs))
        self.buffers = {id(buffer): (buffer, buffer.detach().clone()) for buffer in buffers_in(root)}
        devices = {each.device.index or 0 for each in (*parameters_in(root), *buffers_in(root)) if each.device.type == "cuda"}
        self.random, self.grad = Random.now(sorted(devices)), torch.is_grad_enabled()
        self.graph: torch.fx.Graph | None = None
        self.module: torch.fx.GraphModule | None = None
        self.given: tuple[Any, ...] = ()
        self.written: Set[int] = frozenset()
        self.differentiates = False
        self.sound = True

    def captures(self, module: torch.fx.GraphModule) -> None:
        """Note a graph of the call, while Dynamo captures it."""
        self.sound = self.sound and self.graph is None and not dynamo.changes_objects()
        self.written, self.differentiates = written_inputs(module.graph), differentiates(module.graph)  # a copy finds no bodies
        self.graph, self.module = torch.fx.Graph(), module
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        self.graph.output(self.graph.graph_copy(module.graph, copies))
        for node, copy in copies.items():
            copy.meta = kept_meta(node.meta)

    def runs(self, inputs: tuple[Any, ...]) -> None:
        """Note what the graph is given, before it runs."""
        if not self.sound or self.graph is None or self.given:
            return
        self.sound = all(id(inputs[place]) in self.buffers for place in self.written)
        self.given = tuple(self.buffers[id(each)][1] if id(each) in self.buffers else each for each in inputs)

    def parted(self) -> tuple[float, str] | None:
        """How far the fp32 results of the captured graph are from the model's, and the op from which on; None if they are the same.

        None, too, if it cannot be told.
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
            search = _FirstUnseen(self.module, self.graph, values, tuple(self.random.devices))  # type: ignore[arg-type]
            self._captured(search)
        except _FAILURES:
            return None  # the original model cannot run on copies: nothing can be told
        if search.found is None or search.drew:
            return None
        source = source_of(search.found.stack_trace)
        return far, f"{search.found.name}{f' ({source})' if source else ''}"

    def _is_had(self, had: Sequence[Tensor]) -> bool:
        """Whether the captured graph had what the plain model gives without gradients, which needs no memory for a backward."""
        try:
            return furthest(self._as_written(False), had) <= TOLERANCE
        except _FAILURES:
            return False

    def _as_written(self, grad: bool, values: Values | None = None) -> list[Tensor]:
        """The floating results of the plain model on copies of the arguments, buffers and random states."""
        plain = self.plain()
        copies = {key: start.clone() for key, (_, start) in self.buffers.items()}
        for module in plain.modules():
            module._buffers.update({name: copies.get(id(each), each) for name, each in module._buffers.items() if each is not None})
        args, kwargs = tree_map(copied, (self.args, self.kwargs))
        with Quiet(*loggers_of(plain)), _from(self.random), unhooked(), torch.set_grad_enabled(grad), values or contextlib.nullcontext():
            return [each.detach() for each in results_of(plain.forward(*args, **kwargs))]

    def _captured(self, interpreter: torch.fx.Interpreter) -> Any:
        """The results of the captured graph in fp32."""
        assert self.graph is not None
        grad = self.differentiates and self.grad
        given = list(self.given)
        for place, each in enumerate(given):
            if isinstance(each, Tensor):
                each = each.detach().clone() if place in self.written else each.detach()
                given[place] = each.requires_grad_(grad and self.given[place].requires_grad)
        with _from(self.random), closed_if_raised(), unhooked(), torch.set_grad_enabled(grad):
            return interpreter.run(*given)


__all__ = ["TOLERANCE", "CaptureCheck", "Values", "can_be_checked", "furthest", "results_of"]
