"""A plan as it is drawn: SVG, DOT, Model Explorer."""
