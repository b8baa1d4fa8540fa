"""Run an edited fx graph on fake tensors, to recompute shape and dtype of every node and to find the first op that refuses its dtypes."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch._dispatch.python import enable_python_dispatcher

from amprewrite.graphs.fx.node_facts import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    GRAD_SWITCHES,
    PULL_BACK,
    example_value,
    is_opaque,
    tensors,
    transformed_nodes,
)
from amprewrite.graphs.fx.run.recurrent_layers import LAYERS, in_one_step
from amprewrite.graphs.fx.run.repeated_calls import RepeatedCalls
from amprewrite.graphs.log_quiet import Quiet
from amprewrite.passes.apply.insert_casts import CAST
from amprewrite.passes.apply.insert_pads import PAD
from amprewrite.tables.errors import PassError
from amprewrite.tables.ops.op_lists import op_name
from amprewrite.torch_internals.dispatch import FakeTensor, exit_autocast


class Refused(Exception):
    """Raised in a dry run if an op fails on its inputs, or returns another dtype than planned. `node` is the op, `why` the error text."""

    def __init__(self, node: torch.fx.Node, why: str) -> None:
        super().__init__(f"{node.name}: {why}")
        self.node, self.why = node, why


class _DryRun(torch.fx.Interpreter):
    """Interpreter over fake tensors that stores the result of each node as its new example value."""

    def __init__(self, module: torch.fx.GraphModule, expected: dict[torch.fx.Node, torch.dtype]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.expected = expected
        self.open_autocasts: list[Any] = []
        self.transformed = transformed_nodes(module.graph)
        self.repeated = RepeatedCalls(module.graph, any(PAD in node.meta for node in module.graph.nodes))
        self.touched: set[torch.fx.Node] = set()
        self.unknown: set[torch.fx.Node] = set()
        """Inputs without an example value. In torch 2.11, a size that the backward of a user's autograd Function reads is such an input."""

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr"):
            value = example_value(n)
            if value is None and n.op == "get_attr":
                return super().run_node(n)
            if value is None and n.op == "placeholder" and "val" not in n.meta:  # "val" is in n.meta if the input really is None
                self.unknown.add(n)
            return value
        if n.op == "output":
            return super().run_node(n)
        op = op_name(n.target)
        if n in self.transformed or n.target in (torch.autograd.grad, PULL_BACK) or op in GRAD_SWITCHES:
            return example_value(n)  # keep the value of the capture: these nodes need gradients, which a dry run does not record
        want = self.expected.get(n)
        always = op in (ENTER_AUTOCAST, EXIT_AUTOCAST) or is_opaque(n)  # run these in any case: they set autocast or have a subgraph
        changed = CAST in n.meta or PAD in n.meta or always or not self.touched.isdisjoint(n.all_input_nodes)
        if want is None and not changed:
            return example_value(n)
        self.touched.add(n)
        for given in self.unknown.intersection(n.all_input_nodes) if self.unknown else ():
            raise Refused(n, f"capture left no example value on its input {given.name}")
        layer = getattr(n.target, "__wrapped__", n.target)
        target = in_one_step(layer) if layer in LAYERS else n.target

        def run(values: dict[torch.fx.Node, Any]) -> Any:
            return getattr(self, n.op)(target, *torch.fx.map_arg((n.args, n.kwargs), values.__getitem__))

        try:
            value = run(self.env) if self.open_autocasts else self.repeated.give(n, self.env.__getitem__, run)
        except Exception as error:
            raise Refused(n, _short(error)) from error
        if op == ENTER_AUTOCAST:
            self.open_autocasts.append(value)
        elif op == EXIT_AUTOCAST:
            closed = self.env.get(n.all_input_nodes[0])
            self.open_autocasts = [context for context in self.open_autocasts if context is not closed]
        got = {t.dtype for t in tensors(value) if t.is_floating_point()}
        if want is not None and value is not None and got - {want}:
            raise Refused(n, f"gives {', '.join(map(str, sorted(got - {want}, key=str)))} where {want} was planned")
        n.meta["example_value" if "val" not in n.meta else "val"] = value
        return value


def dry_run(module: torch.fx.GraphModule, expected: dict[torch.fx.Node, torch.dtype]) -> None:
    """Run `module` on fake tensors, and store the results as new example values of its nodes.

    Raises Refused at the first node that fails or does not return its `expected` dtype, PassError if the graph cannot be run at all.

    To save time, a node without an `expected` dtype is run only if a pass changed it, an operand of it was run, it sets autocast, or it has
    a subgraph. Grad mode and autocast are restored at the end.
    """
    values = [t for node in module.graph.nodes for t in tensors(example_value(node))]
    fake_mode = next((t.fake_mode for t in values if isinstance(t, FakeTensor)), None)
    run = _DryRun(module, expected)
    placeholders = [example_value(node) for node in module.graph.nodes if node.op == "placeholder"]
    grad = torch.is_grad_enabled()
    try:
        with torch.no_grad(), Quiet():  # Quiet keeps torch from logging a failed op: the plan records the failure
            if fake_mode is None:
                run.run(*placeholders, enable_io_processing=False)
            else:
                # run ops by their Python implementations, as Dynamo does, because oneDNN's LSTM op takes no symbolic sizes
                with fake_mode, enable_python_dispatcher():
                    run.run(*placeholders, enable_io_processing=False)
    except Refused:
        raise
    except Exception as error:
        raise PassError(f"the edited graph cannot be tried: {_short(error)}") from error
    finally:
        for context in reversed(run.open_autocasts):
            exit_autocast(context)
        torch.set_grad_enabled(grad)


def _short(error: BaseException) -> str:
    """Return the type of the original cause of an error, and the first 160 characters of its text."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"
