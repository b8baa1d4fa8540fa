"""Run a graph in fp32 with an alias of each value for each reader. Backward then gives the output error of rounding for one reader."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import is_checkpoint, written
from amprewrite.graphs.fx.run.observer import inside_transform
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.op_lists import op_name
from amprewrite.torch_internals.trees import tree_flatten, tree_unflatten

_NO_DERIVATIVE = "is not differentiable with respect to argument"
"""Part of the message of PyTorch's error for an operand that requires a gradient although the op has no derivative for it."""

Edges = dict[tuple[str, str], float]
"""For each edge (value, reader) of one graph: the squared output error that rounding the value for this reader causes."""


class EdgeProbe:
    """Runs graphs in fp32. During backward, adds to `edges` the squared output error of rounding each value for each of its readers.

    The caller sets `weight`, a factor on the squared errors, and then runs backward to `leaves`, the leaf tensors made of graph inputs.
    """

    def __init__(self, low: Format) -> None:
        self.low, self.weight = low, 0.0
        self.edges: dict[int, tuple[Captured, Edges]] = {}
        self.leaves: list[torch.Tensor] = []

    def __call__(self, captured: Captured, inputs: tuple[Any, ...]) -> Any:
        _, edges = self.edges.setdefault(id(captured), (captured, defaultdict(float)))
        touched = {node for each in captured.module.graph.nodes for node in written(each)}
        given = zip(captured.module.graph.find_nodes(op="placeholder"), inputs, strict=True)
        return _EdgeInterpreter(captured, self, edges).run(*(self._leaf(value, node in touched) for node, value in given))

    def _leaf(self, value: Any, touched: bool) -> Any:
        """Return a leaf tensor that shares memory with the graph input `value` and requires a gradient, so that each read can get one.

        Return `value` itself if it has a `grad_fn`, is no floating tensor, or if the graph writes it in place (`touched`).
        """
        plain = isinstance(value, torch.Tensor) and value.is_floating_point() and (value.is_leaf or not value.requires_grad)
        if not plain or touched:
            return value
        leaf = value.detach().requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def alias(self, tensor: torch.Tensor, edges: Edges, edge: tuple[str, str]) -> torch.Tensor:
        """Return a view of `tensor` for one reader. During backward, `edges[edge]` grows by the squared output error of rounding this view.

        Return `tensor` itself if it is no dense fp32 tensor that requires a gradient.
        """
        if not (tensor.requires_grad and tensor.dtype == torch.float32 and tensor.layout == torch.strided):
            return tensor
        alias = tensor.view_as(tensor)
        value = tensor.detach()

        @uncaptured
        def weigh(gradient: torch.Tensor | None) -> None:
            if gradient is None:
                return
            rounded = value.to(self.low.dtype).to(torch.float32)
            lost = torch.where(rounded.isfinite(), rounded - value, value).nan_to_num(0, 0, 0)
            edges[edge] += self.weight * (lost * gradient).double().square().sum().item()

        alias.register_hook(weigh)
        return alias


class _EdgeInterpreter(torch.fx.Interpreter):
    def __init__(self, captured: Captured, probe: EdgeProbe, edges: Edges) -> None:
        super().__init__(captured.module, garbage_collect_values=True)
        self.captured, self.probe, self.edges = captured, probe, edges
        self.names = captured.names

    def run_node(self, n: torch.fx.Node) -> Any:
        if op_name(n.target) in ("_set_grad_enabled", "set_grad_enabled") and n.op == "call_function":
            return None  # keep gradients on under no_grad: the plan rounds values there, too, and each rounding error needs a gradient
        if n.op in ("placeholder", "get_attr"):
            return super().run_node(n)
        reader = self.names.get(n, n.name)
        in_place = written(n)  # an operand that the op writes gets no alias: later ops read the written tensor itself

        def operand(node: torch.fx.Node) -> Any:
            value = self.env[node]
            if node in in_place or self._unweighed(node):
                return value
            edge = (self.names.get(node, node.name), reader)
            if isinstance(value, torch.Tensor):
                return self.probe.alias(value, self.edges, edge)
            return value

        args, kwargs = map_arg((n.args, n.kwargs), operand)
        if n.op == "output":
            return args[0]
        if is_checkpoint(n):
            return self.probe(self.captured.parts[n], args[1:])
        try:
            with torch.set_grad_enabled("out" not in kwargs):  # autograd refuses out=, so run such calls under no_grad, as the model does
                return getattr(self, n.op)(n.target, args, kwargs)
        except RuntimeError as error:
            if _NO_DERIVATIVE not in str(error):
                raise
            return getattr(self, n.op)(n.target, *self._constants_cut(n, args, kwargs))

    def _constants_cut(self, n: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return (args, kwargs) of node `n`, with detached copies of operands for which the op has no derivative, such as a running mean.

        To find these operands, the op runs once for each operand that requires a gradient, on copies because the op may write its operands.
        """
        leaves, spec = tree_flatten((args, kwargs))
        kept = [_copy(leaf) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf for leaf in leaves]
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                copies = [_copy(each) for each in leaves]
                copies[index].requires_grad_()
                copied_args, copied_kwargs = tree_unflatten(copies, spec)
                try:
                    getattr(self, n.op)(n.target, copied_args, copied_kwargs)
                    kept[index] = leaf
                except RuntimeError as error:
                    if _NO_DERIVATIVE not in str(error):
                        raise
        return tree_unflatten(kept, spec)

    def _unweighed(self, node: torch.fx.Node) -> bool:
        """True if the error of rounding the value of `node` is not counted.

        Masks do not count, because casts clamp their huge values on purpose. Values inside a torch.func transform are never rounded.
        """
        vertex = self.captured.problem.graph.nodes.get(self.names.get(node, ""))
        return vertex is not None and (vertex.may_saturate or inside_transform(vertex))


def _copy(value: Any) -> Any:
    """Return a detached copy of a tensor. Any other value is returned unchanged."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
