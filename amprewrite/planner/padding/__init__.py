"""Choose which dims of a graph to pad to sizes that Tensor Cores run fast, from the effect of padding on each op and from its cost."""
