"""backend="inductor-exact": inductor, held to the rounding of the plan.

Inductor keeps fp32 inside its kernels, sums in an order of its own and has exponentials of its own. Here it gets one graph with
settings for that graph alone:

1. Nothing that computes is decomposed: a graph holds the calls of kernels that eager code makes, forward and backward.
2. Calls that inductor computes bit for bit as those kernels do are fused (`fusible.py`, `spelling.py`). All others stay calls of the
   kernels, on operands that lie in memory as they do in eager code.
3. A cast rounds, and so does every fused call in a low format.
4. Passes that replace calls by others with other results are off, and random numbers are PyTorch's.
5. No call is made to write into its operand: inductor takes the result of a kernel's call for memory of its own, and gives that of the
   operand to the next value while the result is still read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.fx
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from amprewrite.runtime.compiler.exact.fusible import is_fusible
from amprewrite.runtime.compiler.exact.spelling import decompositions, spell
from amprewrite.tables.errors import PolicyError

SETTINGS: dict[str, Any] = {
    "fallback_by_default": True,
    "emulate_precision_casts": True,
    "fallback_random": True,
    "pattern_matcher": False,
    "disabled_passes": "reinplace_inplaceable_ops",
    "use_pre_grad_passes": False,
    "joint_graph_constant_folding": False,
    "layout_optimization": False,
    "comprehensive_padding": False,
    "shape_padding": False,
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
}
"""Inductor's settings for a graph; the process keeps its own."""


def compile_exactly(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph with inductor so that it gives eager code's numbers."""
    patches = {**SETTINGS, "post_grad_custom_post_pass": ChooseFused()}
    return cast(Callable[..., Any], compile_fx(module, inputs, config_patches=patches, decompositions=decompositions()))


def check_inductor() -> None:
    """Raise PolicyError if this torch's inductor lacks one of the settings."""
    missing = sorted(name for name in SETTINGS if name not in config._config)  # type: ignore[attr-defined]
    if missing:
        raise PolicyError(
            f"backend='inductor-exact' needs inductor's settings {', '.join(missing)}, which torch {torch.__version__} does not have; take "
            "a later torch, or backend='inductor'"
        )


class ChooseFused(CustomGraphPass):
    """Inductor's hook on each graph before it lowers it: mark what it may fuse."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        spell(graph)
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if is_fusible(node):
                node.meta["custom"] = {**node.meta.get("custom", {}), "compile_with_inductor": True}
                node.meta["low_precision_pointwise_barrier"] = True
                continue
            for source in node.all_input_nodes:
                source.meta["inductor_realize_to_strides"] = True  # a kernel may sum in an order that depends on its operand's strides

    def uuid(self) -> bytes:
        """The key, beside inductor's own, under which compiled graphs are kept."""
        return get_hash_for_files(tuple(str(Path(__file__).with_name(name)) for name in ("backend.py", "fusible.py", "spelling.py")))


__all__ = ["SETTINGS", "ChooseFused", "check_inductor", "compile_exactly"]
