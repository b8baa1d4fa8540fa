"""Pictures of a plan: SVG, DOT, Model Explorer."""
