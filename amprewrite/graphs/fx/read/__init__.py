"""Read an fx graph into an op graph: nodes, names, shared memory, calls, body graphs, magnitudes of weights."""
