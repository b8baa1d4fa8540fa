"""Padding rules of ops: which dims may be padded in the operands of an op and, in the same way, in its result."""
