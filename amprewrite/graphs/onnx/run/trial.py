"""Load and run an ONNX model in a separate process, because a crash of ONNX Runtime would end the process that calls it.

ONNX Runtime may crash on a model that onnx.checker refuses. Version 1.31 crashes on some valid models, too (see `may_crash` in
onnx_runtime.py).

The separate process runs this file as a script. The file imports nothing else of amprewrite, so that the process starts quickly.

1. The process loads the model without optimisations, and runs it on the samples until a run succeeds.
2. It loads and runs the model with ONNX Runtime's defaults. This run may fail, but must not abort the process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

ENDS = "it ends the process"
"""Beginning of the text that `failure` returns if the separate process died."""
START = 60.0
"""Seconds allowed for the start of the separate process, enough for a busy machine."""


def failure(model: bytes | str, feeds: Sequence[dict[str, Any]], providers: Iterable[str], seconds: float | None) -> str:
    """Try a model in a separate process. Return "" if ONNX Runtime loads it and runs at least one of `feeds`, otherwise the error as text.

    If `feeds` is empty, loading is enough. `model` is the bytes of a protobuf, or a path. `seconds` is the time limit of one run, from
    which the limit of the whole trial is computed; None for no limit.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        return "there is no Python beside this program to try it in"
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    most = None if seconds is None else START + seconds * (2 * len(feeds) + 1)
    given = pickle.dumps((model, list(feeds), list(providers)))
    try:
        done = subprocess.run([sys.executable, "-P", __file__], input=given, capture_output=True, env=settings, timeout=most, check=False)
    except subprocess.TimeoutExpired:
        return f"it takes longer than {most:g} s"
    except OSError as error:
        return f"no process can be started to try it in: {error}"
    if done.returncode:
        return f"{ENDS} ({done.returncode})"
    return done.stdout.decode(errors="replace").strip()


def _load(model: bytes | str, providers: list[str], plainly: bool) -> Any:
    """Return an ONNX Runtime session of the model. `plainly` switches off all graph optimisations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if plainly:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=providers)


def _run_any(runner: Any, feeds: list[dict[str, Any]]) -> str:
    """Run the session on `feeds` until a run succeeds. Return "" if one does, otherwise the error of the last run."""
    said = ""
    for feed in feeds:
        try:
            runner.run(None, feed)
        except Exception as error:
            said = str(error)
        else:
            return ""
    return said


def main() -> None:
    """Read a pickled (model, feeds, providers) from standard input, try the model, and write the error, if any, to standard output."""
    model, feeds, providers = pickle.load(sys.stdin.buffer)
    try:
        said = _run_any(_load(model, providers, plainly=True), feeds)
    except Exception as error:
        said = str(error)
    if not said:
        with contextlib.suppress(Exception):  # ignore errors: this second run only shows whether the process crashes
            _run_any(_load(model, providers, plainly=False), feeds)
    sys.stdout.buffer.write(said.encode(errors="replace"))


if __name__ == "__main__":
    main()
