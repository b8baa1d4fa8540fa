"""Code for each kind of graph: reading it, the ops it calls, running it, writing it."""
