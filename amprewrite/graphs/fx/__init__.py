"""torch.fx graphs: what is read off a node, and what graphs that were rewritten call."""
