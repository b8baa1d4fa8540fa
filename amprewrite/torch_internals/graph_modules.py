"""The class of fx graph modules that generate their Python code only when they are first called."""

from torch.fx._lazy_graph_module import _LazyGraphModule

LazyGraphModule = _LazyGraphModule
force_recompile = _LazyGraphModule.force_recompile
"""Generate the code of a lazy graph module now, instead of at its first call."""
