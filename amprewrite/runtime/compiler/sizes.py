"""Compile a graph with dynamic sizes again after Dynamo has captured it: once for each combination of sizes that calls pass to it.

During a capture, a backend compiles a graph for all its sizes. Later, when the graph is planned anew (see `LookAhead`) or rewritten for
another model, the backend sees only the inputs of a call. It takes their sizes for constants, and its code does not check them. So each
combination of sizes gets code of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from amprewrite.graphs.fx.captured import copy_graph
from amprewrite.graphs.fx.node_facts import example_value, tensors
from amprewrite.passes.lower.restore_checkpoints import restore_checkpoints
from amprewrite.passes.lower.suit_compiler import give_sources
from amprewrite.runtime.compiler.dynamo import RECOMPILE_LIMIT, without_dispatch_modes
from amprewrite.torch_internals.dispatch import outside_capture, tracing_context


def for_each_size(backend: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `backend`. During a capture, the wrapper compiles a graph once for all sizes; later, once for each combination of sizes.

    Code that is compiled later treats sizes of inputs as constants, but values of tensors as variables. For example, a float argument that
    changes from call to call stays variable, because Dynamo passes it as a tensor.
    """

    def alone(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with outside_capture(ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)) as fixed:
            return backend(module, list(map(fixed, inputs)))  # type: ignore[no-any-return]

    def compile_for_sizes(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if tracing_context() is not None:
            return backend(module, inputs)  # type: ignore[no-any-return]
        dynamic = any(map(_is_dynamic, module.graph.find_nodes(op="placeholder")))
        return _CodeOfSizes(alone, module) if dynamic else alone(module, inputs)

    return compile_for_sizes


def _is_dynamic(node: torch.fx.Node) -> bool:
    """True if an input of a graph is a dynamic size, or a tensor with one."""
    value = example_value(node)
    return isinstance(value, torch.SymInt) or any(isinstance(size, torch.SymInt) for each in tensors(value) for size in each.shape)


class _CodeOfSizes:
    """Callable that compiles `module` once for each combination of grad mode and sizes, strides and `requires_grad` of the inputs. After
    RECOMPILE_LIMIT combinations, `module` runs uncompiled for any new one."""

    def __init__(self, backend: Callable[..., Any], module: torch.fx.GraphModule) -> None:
        self.backend, self.module = backend, module
        self.made: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *inputs: Any) -> Any:
        variant = torch.is_grad_enabled(), *map(_variant, inputs)
        if variant not in self.made:
            if len(self.made) == RECOMPILE_LIMIT:
                return self._uncompiled(*inputs)
            module, _ = copy_graph(self.module)
            give_sources(module.graph)
            with without_dispatch_modes():
                self.made[variant] = self.backend(module, list(inputs))
        return self.made[variant](*inputs)

    @functools.cached_property
    def _uncompiled(self) -> Callable[..., Any]:
        module, _ = copy_graph(self.module)
        restore_checkpoints(module)
        return module.forward


def _variant(value: Any) -> Hashable:
    """Return the key of an input in the table of compiled code: a tensor's sizes, strides and `requires_grad`; any other value itself."""
    if not isinstance(value, Tensor):
        return value  # type: ignore[no-any-return]
    return value.shape, value.requires_grad, value.stride() if value.layout is torch.strided else None
