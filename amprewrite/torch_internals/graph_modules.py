"""Graph modules that generate their code when they are first called."""

from torch.fx._lazy_graph_module import _LazyGraphModule

LazyGraphModule = _LazyGraphModule
force_recompile = _LazyGraphModule.force_recompile
"""Generate the code of a graph module now, not in its first call."""
