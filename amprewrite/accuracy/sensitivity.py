"""How much of a model's output error each rounding causes, for all roundings at once, from a few backward passes.

1. Run the model in fp32, op by op, each op reading every operand through an alias of its own: an *edge* of the graph.
2. Multiply the outputs by random signs z and run backward: for an edge with gradient g and rounding error d of its value,
   sum(d**2 * g**2) is, over the draws of z, the squared output error that rounding the value for this reader causes
   (Hutchinson's estimator; roundings count as independent of one another).
3. Divide by the squared norm of the outputs: the unit is the square of a relative L2 error, and edges add up.

First order, as the sensitivities of mixed-precision planners are (Gaudi's AMP by IP, arXiv 2505.13060; HAWQ-V3): a rounding
that sends a value out of range counts with the whole value.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.fx
from rich.table import Table
from torch import nn
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten

from amprewrite.accuracy.strict.run import output_floats
from amprewrite.accuracy.trial import MOST_KEPT, Batches, Forward, Trial
from amprewrite.graphs.fx.node_facts import is_checkpoint, written
from amprewrite.graphs.fx.observer import inside_transform
from amprewrite.ir.evidence.ranges import as_text
from amprewrite.ir.program import Program
from amprewrite.runtime.model.rewritten import module_of
from amprewrite.runtime.options import Options
from amprewrite.tables.errors import CalibrationError
from amprewrite.tables.formats import Format, parse_format
from amprewrite.tables.ops.op_lists import op_name

PROBES = 4
"""Draws of z a batch. An edge sums over many elements, so few draws do."""

_NO_DERIVATIVE = "is not differentiable with respect to argument"
"""What PyTorch says of an operand that must not ask for a gradient."""

Edges = dict[tuple[str, str], float]
"""(value, reader) of one graph: squared relative output error of rounding the value for this reader."""


@dataclass(frozen=True)
class Cause:
    """The error that running one node low causes, all else in fp32. Relative L2 of the model's outputs."""

    name: str
    op: str
    error: float
    result: float
    """Of rounding its result."""
    operands: float
    """Of rounding what it reads, weights among it."""
    module: str = ""
    source: str = ""


@dataclass(frozen=True)
class Sensitivity:
    """Nodes by the error that each causes when it runs low, worst first."""

    low: str
    causes: tuple[Cause, ...]

    def table(self, n: int = 20) -> Table:
        """The `n` worst nodes as a rich table."""
        table = Table(title=f"output error that each node causes alone in {self.low}: the {min(n, len(self.causes))} worst")
        for title in ("node", "module", "error", "by its result", "by its operands"):
            table.add_column(title, justify="left" if title in ("node", "module") else "right")
        for cause in self.causes[:n]:
            table.add_row(cause.name, cause.module, f"{cause.error:.2e}", f"{cause.result:.2e}", f"{cause.operands:.2e}")
        return table

    def __str__(self) -> str:
        return as_text(self.table())


def sensitivity(
    model: nn.Module | torch.export.ExportedProgram, batches: Iterable[Any], *, dtype: Any = "bf16", forward: Forward | None = None
) -> Sensitivity:
    """Rank the nodes of `model` by the error that each causes alone when it runs in `dtype`, on at most 8 batches.

    Batches are as `amprewrite.calibrate` takes them. Raises CalibrationError for batches that do not fit, and where no output
    depends on a floating value; PolicyError for an unknown dtype.
    """
    module, low = module_of(model), parse_format(dtype)
    trial = Trial(module, Options(low), forward)
    edges = measure_edges(trial, list(islice(Batches(batches, module, forward is not None), MOST_KEPT)), low)
    causes = []
    several = len(edges) > 1
    for program, found in edges:
        into: dict[str, float] = defaultdict(float)
        out: dict[str, float] = defaultdict(float)
        for (value, reader), squared in found.items():
            out[value] += squared
            into[reader] += squared
        for node in program.graph:
            total = out[node.name] + into[node.name]
            if node.role == "op" and total:
                name = f"{program.name}/{node.name}" if several else node.name
                errors = (math.sqrt(total), math.sqrt(out[node.name]), math.sqrt(into[node.name]))
                causes.append(Cause(name, node.op, *errors, node.module, node.source))
    return Sensitivity(low.name, tuple(sorted(causes, key=lambda cause: -cause.error)))


def measure_edges(trial: Trial, batches: Sequence[Any], low: Format) -> list[tuple[Program, Edges]]:
    """The squared relative output error of every edge of every graph that runs, averaged over the batches."""
    probe = _Probe(low)
    generator = torch.Generator().manual_seed(0)
    for batch in batches:
        with torch.enable_grad():
            outputs = [t for t in output_floats(trial.run(batch, probe)) if t.requires_grad]
        trial.check_captured()
        size = sum(t.detach().double().square().nan_to_num(0, 0, 0).sum().item() for t in outputs)
        if not size:
            raise CalibrationError(f"no floating output of {trial.name} depends on its inputs or weights: there is no error to measure")
        probe.weight = 1 / (size * PROBES * len(batches))
        for draw in range(PROBES):
            signs = [(torch.randint(0, 2, t.shape, generator=generator) * 2 - 1).to(t) for t in outputs]
            signs = [torch.where(t.detach().isfinite(), sign, 0) for t, sign in zip(outputs, signs, strict=True)]
            torch.autograd.grad(outputs, probe.leaves, signs, retain_graph=draw + 1 < PROBES, allow_unused=True)
        probe.leaves.clear()
    return list(probe.edges.values())


class _Probe:
    """A manner of running graphs: in fp32, with an alias for every edge, whose gradients add up in `edges`."""

    def __init__(self, low: Format) -> None:
        self.low, self.weight = low, 0.0
        self.edges: dict[int, tuple[Program, Edges]] = {}
        self.leaves: list[torch.Tensor] = []

    def __call__(self, program: Program, inputs: tuple[Any, ...]) -> Any:
        assert program.module is not None
        _, edges = self.edges.setdefault(id(program), (program, defaultdict(float)))
        touched = {node for each in program.module.graph.nodes for node in written(each)}
        given = zip(program.module.graph.find_nodes(op="placeholder"), inputs, strict=True)
        return _Prober(program, self, edges).run(*(self._leaf(value, node in touched) for node, value in given))

    def _leaf(self, value: Any, touched: bool) -> Any:
        """What no gradient would reach, or only of a parameter: a leaf of its own. What is written in place is no leaf."""
        plain = isinstance(value, torch.Tensor) and value.is_floating_point() and (value.is_leaf or not value.requires_grad)
        if not plain or touched:
            return value
        leaf = value.detach().requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def alias(self, tensor: torch.Tensor, edges: Edges, edge: tuple[str, str]) -> torch.Tensor:
        """The same tensor, whose gradient is that of one reader."""
        if not (tensor.requires_grad and tensor.dtype == torch.float32 and tensor.layout == torch.strided):
            return tensor
        alias = tensor.view_as(tensor)
        value = tensor.detach()

        def weigh(gradient: torch.Tensor) -> None:
            rounded = value.to(self.low.dtype).to(torch.float32)
            lost = torch.where(rounded.isfinite(), rounded - value, value).nan_to_num(0, 0, 0)
            edges[edge] += self.weight * (lost * gradient).double().square().sum().item()

        alias.register_hook(weigh)
        return alias


class _Prober(torch.fx.Interpreter):
    def __init__(self, program: Program, probe: _Probe, edges: Edges) -> None:
        assert program.module is not None
        super().__init__(program.module, garbage_collect_values=True)
        self.program, self.probe, self.edges = program, probe, edges
        self.names = {node: name for name, node in program.fx_nodes.items()}

    def run_node(self, n: torch.fx.Node) -> Any:
        if op_name(n.target) in ("_set_grad_enabled", "set_grad_enabled") and n.op == "call_function":
            return None  # rounding does not care for no_grad
        if n.op in ("placeholder", "get_attr"):
            return super().run_node(n)
        reader = self.names.get(n, n.name)
        in_place = written(n)  # an alias of those would not be the tensor that others read

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
            return self.probe(self.program.parts[n], args[1:])
        try:
            return getattr(self, n.op)(n.target, args, kwargs)
        except RuntimeError as error:
            if _NO_DERIVATIVE not in str(error):
                raise
            return getattr(self, n.op)(n.target, *self._constants_cut(n, args, kwargs))

    def _constants_cut(self, n: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operands, copies instead of those for which the op has no derivative: running statistics, class weights.

        Each is tried as the only one with a gradient. The op may write what it reads, and the model's buffers get their old
        values back before backward: hence the copies.
        """
        leaves, spec = tree_flatten((args, kwargs))
        kept = [_copy(leaf) for leaf in leaves]
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
        """Masks saturate, and what they hide causes no error; what is inside a torch.func transform is never rounded."""
        vertex = self.program.graph.nodes.get(self.names.get(node, ""))
        return vertex is not None and (vertex.huge or inside_transform(vertex))


def _copy(value: Any) -> Any:
    """A tensor's copy, which takes no gradient; anything else as it is."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


__all__ = ["Cause", "Edges", "Sensitivity", "measure_edges", "sensitivity"]
