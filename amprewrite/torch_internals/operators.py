"""Classes of operators: OpOverload (`aten.add.Tensor`), OpOverloadPacket (`aten.add`), and HigherOrderOperator, which takes functions."""

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["HigherOrderOperator", "OpOverload", "OpOverloadPacket"]
