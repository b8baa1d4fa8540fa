"""Padding of dims: which dims of a graph are one axis, the effect of padding on every op, and its cost."""
