"""Applying passes: they edit the fx graph by the plan."""
