"""Classes of the operators that graphs call, such as `aten.add.Tensor`, `aten.add` (all its overloads), and one that takes functions."""

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["HigherOrderOperator", "OpOverload", "OpOverloadPacket"]
