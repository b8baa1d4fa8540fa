"""Inductor with the numbers of the plan: what it may fuse without changing a bit, and the backend that has it fuse no more."""
