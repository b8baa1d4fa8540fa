"""Plain data that passes read and write: the op graph, the program on its way, what it costs, and what a pass is."""
