"""fx graph → op graph: nodes, names, memory, calls, inner graphs, magnitudes of weights."""
