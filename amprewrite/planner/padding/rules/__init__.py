"""Padding rules of ops. "A dim passes" means that it may be padded in the operands and, in the same way, in the result of an op."""
