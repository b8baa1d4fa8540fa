"""Find where a training step first computed inf or NaN: the node, its module, and the line of the model's code.

Nothing is checked until a step is skipped. Then:

1. If the forward ran one graph without collectives, its inputs still exist, and its weights are not sharded, the graph runs once more,
   node by node, without gradients. The answer is the first input, weight or result of a node that is not finite, if it reached an output.
2. If this finds nothing, the gradients of the skipped step are searched, in the order of the backward. The answer is the first parameter
   whose gradient is not finite, and the node that reads this parameter.
3. From then on every forward runs node by node, and the gradients of its values are checked as well, until a step is clean. So the answer
   for the next skipped step is exact: bad inputs, an activation, a loss that is not finite, or a gradient.

Infinities that the model writes itself, such as masks of -inf, are no overflow. A result counts only if inf or NaN is neither in the
inputs of its node nor among the constants in its call.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.fx.node import map_aggregate

from amprewrite.graphs.fx.node_facts import NODE, is_batched, written_inputs
from amprewrite.graphs.fx.ops.scale_ops import scale_gradient
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.ir.op_graph import reached
from amprewrite.ir.plans.plan import NodePlan, RegionPlan
from amprewrite.passes.apply.insert_casts import CAST
from amprewrite.runtime.options import is_flattened
from amprewrite.runtime.training.nonfinite import is_finite
from amprewrite.tables.boundary.members import buffers_in, named_parameters_in, parameters_in
from amprewrite.torch_internals.dispatch import is_legacy_batched
from amprewrite.torch_internals.trees import tree_leaves

_INPUT, _PARAMETER, _ACTIVATION, _LOSS, _GRADIENT, _SEEN = "input", "parameter", "activation", "loss", "gradient", "seen"
_KNOWN = {
    _INPUT: {"inputs": False},
    _PARAMETER: {"inputs": True, "parameters": False},
    _ACTIVATION: {"inputs": True, "parameters": True, "outputs": False},
    _LOSS: {"inputs": True, "parameters": True, "outputs": True, "loss": False},
    _GRADIENT: {"inputs": True, "parameters": True, "outputs": True, "loss": True},
    _SEEN: {},  # the gradient of a parameter is not finite: inputs, parameters, outputs and loss may be finite or not
}
_COLLECTIVE = ("c10d", "sync_batch_norm", "SyncBatchNorm")
_LEARNS = operator.attrgetter("requires_grad")


@dataclass(frozen=True)
class FirstNonFinite:
    """The first value of a training step that was inf or NaN: which kind of value it was, and where in the model."""

    kind: str
    """Kind of the value: "input", "parameter", "activation", "loss", "gradient" or "seen". "seen" is a parameter's gradient that was
    found after the step. Then nothing is known about inputs, weights, activations and loss."""
    where: str
    """The place of the value, in words for a message."""

    @property
    def finite(self) -> dict[str, bool]:
        """Return whether "inputs", "parameters", "outputs" and "loss" were finite, as a dict. An unknown answer has no key.

        Example: {"inputs": True, "parameters": False}. The result is passed to `StepRecord.note` as keyword arguments.
        """
        return _KNOWN[self.kind]


Probed = tuple[RegionPlan, torch.fx.GraphModule | None]
"""A graph: (its plan, its fx module after the rewrite). The module is None if the graph does not multiply gradients by the loss scale."""


class OverflowProbe:
    """Finds where a skipped step of one model overflowed. Then watches the model's graphs until a step has no overflow.

    A watched graph runs node by node, so that the exact place is known if the next step is skipped, too. While `armed` is True, the caller
    must run the graphs by `run`.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.armed = False
        self.forward: FirstNonFinite | None = None
        self.backward: FirstNonFinite | None = None

    def disarm(self) -> None:
        """Stop the watch over the graphs, and forget the non-finite values found so far. Call this after a step without overflow."""
        self.armed = False
        self.forward = self.backward = None

    def find(self, graphs: Sequence[Probed], latest: LatestInputs | None) -> FirstNonFinite | None:
        """Return the first non-finite value of the step that was just skipped; None if it is not found.

        `graphs`: the graphs that the latest forward ran. `latest`: the inputs of the graph if the forward ran only one; otherwise None.
        Also sets `armed` to True, so that the graphs of the next steps are watched.
        """
        found = self.forward or self.backward
        if found is None and latest is not None and len(graphs) == 1:
            found = self._run_again(*graphs[0], latest)
        found = found or self._by_parameters(graphs)
        self.armed = True
        self.forward = self.backward = None
        return found

    def run(self, plan: RegionPlan, module: torch.fx.GraphModule, inputs: tuple[Any, ...]) -> Any:
        """Run a graph node by node and return its output. Record the first value, and later the first gradient, that is not finite."""
        watched = _FiniteWatch(module, _names(plan), self)
        result = watched.run(*inputs)
        self.forward = self.forward or watched.first_activation()
        return result

    def _run_again(self, plan: RegionPlan, module: torch.fx.GraphModule | None, latest: LatestInputs) -> FirstNonFinite | None:
        if module is None or any(word in str(node.target) for node in module.graph.nodes for word in _COLLECTIVE):
            return None  # one rank must not run collectives again: it would wait for the other ranks
        inputs = latest.copies({id(p): p for p in parameters_in(self.root)}, {id(b): b for b in buffers_in(self.root)}, module.graph)
        if inputs is None:
            return None
        watched = _FiniteWatch(module, _names(plan), self)
        devices = sorted({t.device.index or 0 for t in inputs if isinstance(t, Tensor) and t.is_cuda})
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            watched.run(*inputs)
        return watched.first_activation()

    def _by_parameters(self, graphs: Iterable[Probed]) -> FirstNonFinite | None:
        gradients = {
            name: p.grad for name, p in named_parameters_in(self.root, remove_duplicate=False) if p.grad is not None and p.grad.numel()
        }
        readers: dict[str, NodePlan] = {}
        for plan, _ in graphs:
            for node in plan.nodes:
                for value in node.inputs:
                    if value in gradients and node.role == "op":
                        readers.pop(value, None)
                        readers[value] = node
        order = [*(name for name in gradients if name not in readers), *readers]
        for name in reversed(order):
            if not is_finite(gradients[name]):
                return FirstNonFinite(_SEEN, f"the gradient of {name}" + (f", read by {_place(readers[name])}" if name in readers else ""))
        return None


class LatestInputs:
    """Remembers the inputs of a graph's latest call, by weak references, so that the graph can run once more.

    Only numbers (Python numbers, 0-dim tensors without gradients) are kept alive: Dynamo may make such a tensor and keep no reference.
    """

    def __init__(self, plan: RegionPlan, module: torch.fx.GraphModule) -> None:
        roles = {node.name: node.role for node in plan.nodes}
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        found = [roles.get(node.meta.get(NODE, "")) for node in inputs]
        self._own = [index for index, role in enumerate(found) if role in ("parameter", "buffer")]
        self._fed = [index for index, role in enumerate(found) if role not in ("parameter", "buffer")]
        self._ids: list[int] = []
        """Ids of parameters and buffers, which the model keeps alive. With weak references to them `torch.utils.swap_tensors` fails."""
        self._data: list[Any] = []

    def taking_gradients(self, inputs: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors in `inputs` that require gradients, as (parameters and buffers, all other tensors).

        `inputs`: the inputs of one call, without the last two inputs of the rewritten graph, which are the loss scale and its inverse.
        """
        learning = list(filter(_LEARNS, map(inputs.__getitem__, self._own)))
        return learning, [t for at in self._fed if at < len(inputs) and isinstance(t := inputs[at], Tensor) and t.requires_grad]

    def keep(self, inputs: Sequence[Any]) -> None:
        """Remember all inputs of one call of the rewritten graph. The last two are the loss scale and its inverse."""
        self._ids = list(map(id, map(inputs.__getitem__, self._own)))
        ref = weakref.ref
        data = map(inputs.__getitem__, self._fed)
        self._data = [ref(value) if isinstance(value, Tensor) and (value.dim() or value.requires_grad) else value for value in data]

    def copies(self, parameters: Mapping[int, Tensor], buffers: Mapping[int, Tensor], graph: torch.fx.Graph) -> list[Any] | None:
        """Return copies of the remembered inputs, for another run of `graph`. Parameters are copied only if the graph overwrites them.

        `parameters` and `buffers` map ids to the parameters and buffers of the model. Returns None if an input no longer exists, if a
        parameter or buffer is no longer in the model, or if FSDP1 shards a parameter.
        """
        values: dict[int, Any] = {}
        written = written_inputs(graph)
        for index, number in zip(self._own, self._ids, strict=True):
            value = parameters.get(number, buffers.get(number))
            if value is None or is_flattened(value):
                return None
            values[index] = value.detach().clone() if number in buffers or index in written else value
        for index, kept in zip(self._fed, self._data, strict=True):
            value = kept() if isinstance(kept, weakref.ref) else kept
            if value is None:
                return None
            values[index] = value.detach().clone() if isinstance(value, Tensor) else value
        return [values[index] for index in range(len(values))]


class _FiniteWatch(torch.fx.Interpreter):
    """Runs a rewritten graph node by node, and records the nodes whose results or gradients are not finite."""

    def __init__(self, module: torch.fx.GraphModule, names: dict[str, NodePlan], probe: OverflowProbe) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.names, self.probe = names, probe
        self.state: dict[torch.fx.Node, tuple[bool, bool]] = {}
        """(holds NaN, holds an infinity) for each node whose result is not finite."""
        self.causes: list[torch.fx.Node] = []
        """Nodes whose result holds NaN or an infinity that came from none of their inputs and constants, in the order in which they ran."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "output":
            return result
        floats = list(_floats(result))
        with torch.no_grad():  # the checks must save no tensors for backward, because activation checkpoints count saved tensors
            nan = any(bool(t.isnan().any()) for t in floats)
            given = n.op in ("placeholder", "get_attr")  # here -inf is no overflow: masks hold it on purpose
            inf = any(bool((t.isposinf() if given and not t.is_complex() else t.isinf()).any()) for t in floats)
        if nan or inf:
            self.state[n] = nan, inf
            fed = [self.state.get(feeder, (False, False)) for feeder in n.all_input_nodes]
            fed.append(_written(n))
            explained = any(f[0] for f in fed) if nan else any(f[0] or f[1] for f in fed)
            if not explained:
                self.causes.append(n)
        for t in floats:
            if t.requires_grad and t.grad_fn is not None:
                t.register_hook(_on_gradient(self.probe, n, self.names))
        return result

    def first_activation(self) -> FirstNonFinite | None:
        """Return the first value of the forward (input, weight or activation) whose NaN or infinity reached an output; None if none did."""
        output = next(n for n in self.module.graph.nodes if n.op == "output")  # type: ignore[union-attr]
        found = set(reached([output], lambda node: self.state.keys() & node.all_input_nodes))
        cause = next((n for n in self.causes if n in found), None)
        if cause is None:
            return None
        planned = self.names.get(cause.meta.get(NODE, ""))
        what = "NaN" if self.state[cause][0] else "an infinity"
        if planned is not None and cause.op in ("placeholder", "get_attr"):
            kind = _PARAMETER if planned.role in ("parameter", "buffer", "constant") else _INPUT
            return FirstNonFinite(kind, f"{what} in {planned.role} {planned.name}")
        value = cause.name if planned is None else f"{planned.role} {planned.name}"
        if planned is not None and planned.role == "op":
            value = f"the activation of {_place(planned)}"
        return FirstNonFinite(_ACTIVATION, f"{value}{f', cast to {cause.meta[CAST]}' if CAST in cause.meta else ''}: {what}")


def _on_gradient(probe: OverflowProbe, node: torch.fx.Node, names: dict[str, NodePlan]) -> Any:
    @uncaptured
    def look(gradient: Tensor | None) -> None:
        # Skip None (the loss does not depend on the value), and a gradient batched by a vmap of backward passes or `is_grads_batched=True`.
        if gradient is None or probe.backward is not None or is_batched(gradient) or is_legacy_batched(gradient) or is_finite(gradient):
            return
        if node.target is scale_gradient:
            probe.backward = FirstNonFinite(_LOSS, "the gradient that reached the model's output: the loss, or what follows the model")
            return
        planned = names.get(node.meta.get(NODE, ""))
        reader = next((names[user.meta[NODE]] for user in node.users if user.meta.get(NODE) in names), None)
        if planned is not None and planned.role == "op":
            probe.backward = FirstNonFinite(_GRADIENT, f"the gradient of {_place(planned)}")
        elif planned is not None:
            by = f", read by {_place(reader)}" if reader else ""
            probe.backward = FirstNonFinite(_GRADIENT, f"the gradient of {planned.role} {planned.name}{by}")

    return look


def _place(node: NodePlan) -> str:
    """Describe a node for a message, as in "node linear_3 in encoder.layer.0 (model.py:17)"."""
    where = f" in {node.module}" if node.module else ""
    return f"node {node.name}{where}" + (f" ({node.source})" if node.source else "")


def _names(plan: RegionPlan) -> dict[str, NodePlan]:
    return {node.name: node for node in plan.nodes}


def _floats(value: Any) -> Iterator[Tensor]:
    """Return an iterator over the floating-point and complex tensors in `value` that torch can check for inf and NaN.

    It leaves out tensors that a vmap has batched, and float8 tensors, for which torch has no `isinf`.
    """
    leaves = (value,) if isinstance(value, Tensor) else tree_leaves(value) if isinstance(value, tuple | list) else ()
    tensors = (t for t in leaves if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and t.itemsize > 1)
    return (t for t in tensors if not is_batched(t))


def _written(node: torch.fx.Node) -> tuple[bool, bool]:
    """Return two bools: whether NaN, and whether an infinity, is among the float literals in the arguments of `node`."""
    found = [False, False]

    def look(leaf: Any) -> Any:
        if isinstance(leaf, float):
            found[0] |= math.isnan(leaf)
            found[1] |= math.isinf(leaf)
        return leaf

    map_aggregate((node.args, node.kwargs), look)
    return found[0], found[1]
