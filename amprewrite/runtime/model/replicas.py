"""torch.nn.DataParallel over a rewritten model: its replicas, one a device, each in a thread, for one forward.

1. `torch.nn.parallel.replicate` copies the parameters to each device and asks each module for a replica, which it gives the copies.
2. A replica of a rewritten model, or of a part, is called as the model itself, with the tensors of the replica in place of parameters and
   buffers. So all replicas have one session: one plan, one loss scale, one set of guarded optimizers. Low copies are made of the
   replica's tensors, on its device.
3. Replicas take turns, for the model holds the tensors of one at a time. An accelerator works on while the next one is called.
4. Gradients leave the graphs unscaled and in fp32; PyTorch adds them up on the first device. An infinity of one replica is an infinity of
   the sum, so the step is skipped once for all.
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
    """The copy of `module`, a rewritten model or a part, that torch.nn.parallel.replicate gets."""
    refuse_frozen(module, "replicating it")
    session.gate.look_for_optimizers()  # now, because replicas run on copies, which no optimizer owns
    replica: nn.Module = nn.Module._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]
    replica.__dict__["_compiled_call_impl"] = _ReplicaCall(session, module, replica)
    return replica


class _ReplicaCall:
    """Runs in place of a replica's own `__call__`; hooks run in the call of the module itself."""

    def __init__(self, session: Session, module: nn.Module, replica: nn.Module) -> None:
        self.session, self.module = session, module
        self.replica = weakref.ref(replica)  # a circle would keep the copies of all parameters until the garbage collector comes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        replica = self.replica()
        assert replica is not None
        with self.session.turn:
            return functional_call(self.module, dict(_tensors_of(replica)), args, kwargs)


def _tensors_of(replica: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that torch.nn.parallel.replicate gave a replica."""
    for path, module in nn.Module.named_modules(replica):
        for name, tensor in (*module._former_parameters.items(), *module._buffers.items()):  # type: ignore[union-attr, operator]
            if tensor is not None:
                yield f"{path}.{name}".lstrip("."), tensor


__all__ = ["REPLICATE", "replica_of"]
