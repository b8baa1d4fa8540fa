"""Run a rewritten model under torch.nn.DataParallel, which makes a replica for each device and calls each replica in a thread.

1. `torch.nn.parallel.replicate` copies the parameters to each device, asks each module for a replica, and gives the copies to the replica.
2. A call of a replica calls the model itself, with the tensors of the replica in place of parameters and buffers. So all replicas have
   one session: one plan, one loss scale, one set of guarded optimizers. Low copies are made of the replica's tensors, on its device.
3. Only one replica runs at a time, because the model holds the tensors of one replica. An accelerator still computes for a replica while
   the host calls the next.
4. The graphs return unscaled fp32 gradients, and PyTorch adds them on the first device. If the gradient of one replica overflows, so does
   the sum, and the optimizer step is skipped for all.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from amprewrite.runtime.session import Session
from amprewrite.runtime.weights.freezing import refuse_frozen

REPLICATE = "_replicate_for_data_parallel"


def replica_of(session: Session, module: nn.Module) -> nn.Module:
    """Return a replica of `module`, a rewritten model or a part of it, for torch.nn.parallel.replicate.

    Raises PolicyError if the model is frozen.
    """
    refuse_frozen(module, "replicating it")
    session.training.gate.knows_optimizer()  # search for optimizers before the replica runs: none of them owns the replica's tensors
    replica: nn.Module = nn.Module._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]
    replica.__dict__["_compiled_call_impl"] = _ReplicaCall(session, module, replica)
    return replica


class _ReplicaCall:
    """The call of a replica: it calls `module` with the tensors of the replica. Hooks run once, in the call of `module`."""

    def __init__(self, session: Session, module: nn.Module, replica: nn.Module) -> None:
        self.session, self.module = session, module
        self.replica = weakref.ref(replica)  # weak: a reference cycle would keep the replica's tensors until the next garbage collection

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        replica = self.replica()
        assert replica is not None
        with self.session.turn:
            return functional_call(self.module, dict(_tensors_of(replica)), args, kwargs)


def _tensors_of(replica: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of the parameters and buffers that torch.nn.parallel.replicate gave a replica."""
    for path, module in nn.Module.named_modules(replica):
        for name, tensor in (*module._former_parameters.items(), *module._buffers.items()):  # type: ignore[union-attr, operator]
            if tensor is not None:
                yield f"{path}.{name}".lstrip("."), tensor
