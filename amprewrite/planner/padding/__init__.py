"""Which dims of a graph are one axis, what padding them does to every op, and what it costs."""
