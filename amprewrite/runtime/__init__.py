"""Rewritten models at run time: their state, and each of their calls."""
