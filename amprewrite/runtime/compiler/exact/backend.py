"""backend="inductor-exact": compile with inductor, but round every value where the plan rounds it.

By default inductor keeps fp32 values inside its kernels, adds up sums in another order than eager code, and uses other implementations of
the exponential. Here inductor compiles each graph with settings that apply to that graph only:

1. Ops that compute are not decomposed: a graph calls the same kernels as eager code, forward and backward.
2. Inductor fuses calls that it computes bit for bit as eager code's kernels do (`spelling.py`). All other calls stay calls
   of these kernels, on operands with the same memory layout as in eager code.
3. Casts round, and so does every fused call in a low format.
4. Passes of inductor that replace a call by a call with another result are off. Random numbers are PyTorch's.
5. No call is changed to write into its operand. Inductor would treat the result of such a call as separate memory, and
   reuse the memory of the operand while the result is still read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from amprewrite.runtime.compiler.exact.spelling import decompositions, is_fusible, spell

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
"""Inductor's settings for a graph. The settings of the process do not change."""


def compile_exactly(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph with inductor, and return a function that gives the same numbers as eager code. `inputs` are example inputs."""
    patches = {**SETTINGS, "post_grad_custom_post_pass": ChooseFused()}
    return cast(Callable[..., Any], compile_fx(module, inputs, config_patches=patches, decompositions=decompositions()))


class ChooseFused(CustomGraphPass):
    """A pass that inductor runs on each graph before lowering. It replaces calls by equivalent calls that inductor can fuse (`spell`), and
    marks all calls that inductor may fuse. The operands of all other calls keep eager code's strides."""

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
                source.meta["inductor_realize_to_strides"] = True  # keep eager code's strides: they may decide in which order a kernel sums

    def uuid(self) -> bytes:
        """Return a key of this pass for inductor's cache of compiled graphs: a hash of the source files in this folder."""
        return get_hash_for_files(tuple(str(Path(__file__).with_name(name)) for name in ("backend.py", "spelling.py")))
