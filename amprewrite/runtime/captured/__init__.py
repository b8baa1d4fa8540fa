"""Run captured graphs: the graphs of each entry, the calls of a graph, and the events after which a graph is planned anew."""
