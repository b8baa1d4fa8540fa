"""Questions to a plan: why an op runs as it does, what would change it, and which pass decided."""
