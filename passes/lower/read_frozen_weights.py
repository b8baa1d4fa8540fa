"""Pass frozen weights (`amp.freeze()`) to a graph in the low format in which they are stored.

1. A low-precision copy of a frozen weight becomes a trailing input, and each call passes the stored tensor. No weight cache is used.
2. For a frozen weight that is read in fp32, the graph takes its fp32 values if they are kept. Otherwise it takes the low values and casts
   them up.
3. A graph that writes a frozen weight is refused, because the write would be lost.
4. An exported graph holds its weights. Weights that it reads only in the low format are stored in the low format (`store_low`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from amprewrite.graphs.fx.captured import EditedGraph, Target
from amprewrite.graphs.fx.node_facts import example_value, held_value, memory_of, written_memory
from amprewrite.graphs.fx.ops.pad_ops import pad_cast
from amprewrite.graphs.fx.weights.frozen_weight import REMEDY, FrozenWeight
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.pad_plan import Layout
from amprewrite.passes.apply.insert_casts import CAST
from amprewrite.passes.lower.hoist_weight_casts import hoist_weight_casts
from amprewrite.tables.boundary.members import named_parameters_in
from amprewrite.tables.errors import CaptureError

CompiledFn = Callable[..., Any]


class ReadFrozenWeights(Pass[Target, EditedGraph]):
    needs = ("frozen",)

    def __call__(self, target: Target, edited: EditedGraph) -> None:
        _refuse_writes(edited.module, target.frozen)
        if target.training and target.weight_cache is None:
            edited.make_own()
        edited.stored = hoist_weight_casts(edited.module, target.training, target.frozen.__contains__)
        edited.cast_up = cast_up(edited.module, target.frozen)
        edited.module.recompile()


def _refuse_writes(module: torch.fx.GraphModule, frozen: Mapping[int, FrozenWeight]) -> None:
    """Raise CaptureError if the graph writes a frozen weight. `frozen` maps positions of inputs to weights."""
    changing = written_memory(module.graph)
    for place, node in enumerate(module.graph.find_nodes(op="placeholder")):
        if place in frozen and not changing.isdisjoint(memory_of(node)):
            raise CaptureError(f"the model writes {node.name}, a frozen weight, when it is called; {REMEDY}")


def cast_up(module: torch.fx.GraphModule, frozen: Mapping[int, FrozenWeight]) -> list[int]:
    """Insert a cast to fp32 for each frozen weight that the graph reads in fp32 but that has only low values. Return their positions."""
    found: list[int] = []
    for place, node in enumerate(module.graph.find_nodes(op="placeholder")):
        if place not in frozen or frozen[place].exact or not node.users:
            continue
        users = list(node.users)
        after = module.graph.find_nodes(op="placeholder")[-1]
        with module.graph.inserting_after(after):
            high = module.graph.call_method("to", (node, torch.float32))
        high.meta = {key: value for key, value in node.meta.items() if key in ("example_value", "val")}
        for user in users:
            user.replace_input_with(node, high)
        found.append(place)
    return found


def example_inputs_of(inputs: Sequence[Any], frozen: Mapping[int, FrozenWeight], edited: EditedGraph) -> list[Any]:
    """Return `inputs` in the form that a compiled graph takes, with tensors in place of FrozenWeight objects.

    Also edit the graph: the example value of a frozen weight that keeps no fp32 values gets the dtype of its low values.
    """
    given = _given(inputs, frozen, edited, compiled=True)
    for place, node in enumerate(edited.module.graph.find_nodes(op="placeholder")):
        if place in frozen and not frozen[place].exact:
            node.meta["example_value"] = example_value(node).to(given[place].dtype)
    return given


def _given(inputs: Sequence[Any], frozen: Iterable[int], edited: EditedGraph, compiled: bool) -> list[Any]:
    """Return `inputs` with tensors in place of FrozenWeight objects: the fp32 values if kept, or low values if the graph casts them up.

    `frozen` are the positions of these objects. An object in neither case is not read: it stays, or becomes its low copy if `compiled`.
    """
    given = list(inputs)
    for place in frozen:
        weight: FrozenWeight = inputs[place]
        if weight.high is not None:
            given[place] = weight.high.detach() if compiled else weight.high
        elif place in edited.cast_up:
            given[place] = weight.low()
        elif compiled:
            given[place] = weight.detached
    return given


def stored_copy(weight: FrozenWeight, dtype: torch.dtype, layout: Layout, grad: bool) -> Tensor:
    """Return a frozen weight in `dtype`, padded to `layout`: the stored tensor if it matches both, otherwise a new copy.

    `grad` is True if the call records gradients. A stored tensor is then returned detached, since a frozen weight gets no gradient.
    """
    if not weight.holds(dtype, layout):
        return pad_cast(weight.low().float() if weight.high is None else weight.high, dtype, layout)
    return weight.detached if grad else weight.stored


def with_frozen_weights(
    run: CompiledFn, edited: EditedGraph, frozen: Mapping[int, FrozenWeight], compiled: bool, quiet: bool
) -> CompiledFn:
    """Return a callable that calls `run` with the stored copies of the frozen weights among its inputs.

    `frozen` maps positions of inputs to weights. `compiled`: a compiler made `run`. `quiet`: nothing in the graph needs gradients, so calls
    record none. Copies keep the requires_grad flags of their weights, by which PyTorch chooses kernels (see WeightCache).
    """
    stored, places = list(edited.stored), list(frozen)

    def call(*values: Any) -> Any:
        grad = torch.is_grad_enabled()
        copies = [stored_copy(values[place], dtype, layout, grad and not quiet) for place, dtype, layout in stored]
        given = _given(values, places, edited, compiled)
        if not (grad and quiet):
            return run(*given, *copies)
        with torch.no_grad():
            return run(*given, *copies)

    return call


def store_low(edited: torch.fx.GraphModule) -> None:
    """Store in a low format, in place, each parameter that a graph reads only through casts to this format. Erase these casts."""
    readers: dict[Tensor, list[torch.fx.Node]] = defaultdict(list)
    for node in edited.graph.find_nodes(op="get_attr"):
        held = held_value(node)
        if isinstance(held, nn.Parameter):
            readers[held].append(node)
    for weight, nodes in readers.items():
        users = [user for node in nodes for user in node.users]
        formats: set[Any] = {user.args[1] for user in users if CAST in user.meta and user.target == "to"}
        if len(formats) != 1 or not all(CAST in user.meta and user.target == "to" for user in users):
            continue
        stored = nn.Parameter(weight.detach().to(formats.pop()), requires_grad=False)
        for name in [name for name, each in named_parameters_in(edited, remove_duplicate=False) if each is weight]:
            path, _, last = name.rpartition(".")
            setattr(edited.get_submodule(path), last, stored)
        for node in nodes:
            for user in list(node.users):
                user.replace_all_uses_with(node)
                edited.graph.erase_node(user)
    edited.recompile()
