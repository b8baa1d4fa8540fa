"""Classes of operators in a graph: a single overload, all overloads of a name, and higher-order operators, which take functions."""

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["HigherOrderOperator", "OpOverload", "OpOverloadPacket"]
