"""Applying passes: they edit the fx graph as the plan says."""
