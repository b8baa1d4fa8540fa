"""Compute the values of a graph that depend on no input (positions, lengths, parts of masks) only once, and keep them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx
from torch import Tensor

from amprewrite.graphs.fx.ops.cuda_graphs import recording
from amprewrite.torch_internals.dispatch import disable_dispatch_modes

_TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL)


class Constants:
    """Computes the values of the nodes `results` at the first call, and keeps them. These nodes of a graph depend on no input.

    `nodes` are all nodes that compute these values, in order. While a call is traced or a CUDA graph is recorded, kept values would be
    wrong, so the values are computed again.
    """

    def __init__(self, nodes: Sequence[torch.fx.Node], results: Sequence[torch.fx.Node]) -> None:
        graph = torch.fx.Graph()
        made: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in nodes:
            made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(tuple(made[node] for node in results))
        self._module = torch.fx.GraphModule({}, graph)
        self._kept: tuple[Tensor, ...] | None = None

    def take(self) -> tuple[Tensor, ...]:
        """Return the values, one tensor for each node of `results`. The caller must not write to them."""
        if any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING):
            return self._module()  # type: ignore[no-any-return]
        if self._kept is None or recording(self._kept[0].device):
            with disable_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
                made: tuple[Tensor, ...] = self._module()
            if recording(made[0].device):
                return made  # not kept: a replay of the CUDA graph must compute the values, because this object may be gone by then
            self._kept = made
        return self._kept


def take_constants(constants: Constants) -> tuple[Tensor, ...]:
    """Return `constants.take()`. Rewritten graphs call this function."""
    return constants.take()
