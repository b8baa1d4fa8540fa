"""Passes and functions that run after the graph is edited as planned: they check it, tidy it, and turn it into a callable."""
