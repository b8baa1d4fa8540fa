"""Everything of a process that a library could leave changed, to compare before and after."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

GLOBAL_HOOKS = {
    name: value
    for place in (modules, optimizers)
    for name, value in vars(place).items()
    if name.startswith("_global_") and isinstance(value, dict)
}


def process_state() -> dict[str, Any]:
    """Each part by name, comparable with ==."""
    found: dict[str, Any] = {
        "stdout": sys.stdout, "stderr": sys.stderr, "stdin": sys.stdin, "excepthook": sys.excepthook,
        "showwarning": warnings.showwarning, "filters": list(warnings.filters),
        "environment": dict(os.environ), "folder": Path.cwd(), "path": list(sys.path),
        "signals": [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "threads": {each.ident for each in threading.enumerate() if each.is_alive()},
        "dtype": torch.get_default_dtype(), "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(), "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "matmul": torch.get_float32_matmul_precision(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "kernel threads": torch.get_num_threads(), "anomaly": torch.is_anomaly_enabled(),
        "random": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "numpy random": hashlib.sha256(np.random.get_state()[1].tobytes()).hexdigest(),  # type: ignore[union-attr, index]
        "python random": random.getstate(),
        "dynamo settings": torch._dynamo.config.get_config_copy(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(), "function modes": torch._C._len_torch_function_stack(),
    }  # fmt: skip
    found |= {name: dict(hooks) for name, hooks in GLOBAL_HOOKS.items()}
    for name, logger in [("root", logging.root), *logging.root.manager.loggerDict.items()]:
        if isinstance(logger, logging.Logger):
            found[f"logger {name}"] = (logger.level, logger.propagate, logger.disabled, list(logger.handlers), list(logger.filters))
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs, by name. A logger that somebody asked for by name is no change while it has nothing of its own."""
    fresh = (logging.NOTSET, True, False, [], [])
    names = [name for name in {*before, *after} if before.get(name, fresh) != after.get(name, fresh)]
    return {name: (before.get(name), after.get(name)) for name in names}
