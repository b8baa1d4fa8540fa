"""Padding rules of ops, one row an op. A dim passes an op if it may be padded in its operands and its result alike."""
