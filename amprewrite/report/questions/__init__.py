"""Questions about a plan: why an op has its colour, what would change it, and which pass decided."""
