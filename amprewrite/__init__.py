"""Automatic mixed precision as a graph-rewrite compiler pass for PyTorch."""

from pathlib import Path as _Path

# In a checkout `passes/` stands beside this folder; an installed wheel holds it as amprewrite/passes.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "passes" / "__init__.py").is_file():
    __path__.append(str(_root))
