"""Load the ONNX functions, which need the onnx extra, without importing code that captures or runs PyTorch models."""

from __future__ import annotations

from types import ModuleType

from amprewrite.tables.errors import EmitError


def load_onnx_support() -> ModuleType:
    """Import and return amprewrite.api.onnx.convert. Raises EmitError with the install command if the onnx extra is missing."""
    try:
        from amprewrite.api.onnx import convert
    except ImportError as error:
        raise EmitError(f"ONNX needs {error.name}, which is not installed: pip install 'amprewrite[onnx]' (GPU: [onnx-gpu])") from error
    return convert
