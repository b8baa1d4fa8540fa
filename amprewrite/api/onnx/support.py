"""The door to all that needs the onnx extra: it loads nothing of what captures and runs PyTorch models."""

from __future__ import annotations

from types import ModuleType

from amprewrite.tables.errors import EmitError


def load_onnx_support() -> ModuleType:
    """amprewrite.api.onnx.convert, which needs the onnx extra; EmitError with the install line if that is missing."""
    try:
        from amprewrite.api.onnx import convert
    except ImportError as error:
        raise EmitError(f"ONNX needs {error.name}, which is not installed: pip install 'amprewrite[onnx]' (GPU: [onnx-gpu])") from error
    return convert


__all__ = ["load_onnx_support"]
