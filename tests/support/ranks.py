"""Run functions on two ranks of one process group, started once."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amprewrite import AmpRewriteWarning


def on_two_ranks(folder: Any, *tasks: Callable[[int], None]) -> None:
    """Each task once on both ranks, one after another; a warning of amprewrite is an error."""
    torch.multiprocessing.spawn(_rank, (f"file://{folder}/store", tasks), nprocs=2)


def _rank(rank: int, address: str, tasks: tuple[Callable[[int], None], ...]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", AmpRewriteWarning)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    for task in tasks:
        task(rank)
        gc.collect()
        dist.barrier()  # gloo aborts if a rank leaves while another still talks
    dist.destroy_process_group()


class GatheredBytes(TorchDispatchMode):
    """Counts the bytes that all-gathers bring to this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in str(func):
            gathered = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            self.bytes += gathered.numel() * gathered.element_size()
        return func(*args, **(kwargs or {}))
