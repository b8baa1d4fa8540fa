"""Padding of dims: finds which dims of a graph are one axis, the effect of padding on every op, and the cost of padding."""
