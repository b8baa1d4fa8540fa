"""Classes of the operators that a graph calls: an overload, all overloads of one name, an operator that takes functions."""

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["HigherOrderOperator", "OpOverload", "OpOverloadPacket"]
