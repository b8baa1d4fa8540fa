"""The ONNX functions that users call. They import the ONNX packages only when they are called."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from amprewrite.tables.errors import EmitError

if TYPE_CHECKING:
    from amprewrite.api.onnx.job import OnnxResult


def rewrite_onnx(model: Any, out: Any = None, **options: Any) -> OnnxResult:
    """Rewrite an fp32 ONNX model to mixed precision, return the result, and write the new model to the path `out` if given.

    `model` is a path, a ModelProto or an onnx_ir model; it does not change. `amprewrite.api.onnx.convert.rewrite_onnx` documents `options`,
    the result and further errors. Raises EmitError if the onnx extra is not installed.
    """
    return _convert().rewrite_onnx(model, out, **options)  # type: ignore[no-any-return]


def export_onnx(amp: Any, path: Any, args: Any = None, kwargs: Any = None, **options: Any) -> OnnxResult:
    """Write the rewritten model `amp` to `path` as an ONNX file, and return the result.

    `amprewrite.api.onnx.convert.export_onnx` documents the arguments, the result and further errors. Raises EmitError if the onnx extra is
    not installed.
    """
    return _convert().export_onnx(amp, path, args, kwargs, **options)  # type: ignore[no-any-return]


def _convert() -> ModuleType:
    try:
        from amprewrite.api.onnx import convert
    except ImportError as error:
        raise EmitError(f"ONNX needs {error.name}, which is not installed: pip install 'amprewrite[onnx]' (GPU: [onnx-gpu])") from error
    return convert
