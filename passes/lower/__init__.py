"""Passes and functions that run after the plan is applied: check the graph, tidy it, and make it a callable."""
