"""Deciding passes that turn colours into casts and pads, and weigh the plan against others."""
