"""Deciding passes that turn colours into casts and pads, and price the plan against alternatives."""
