"""Facts that decisions rest on: value ranges, constants, counts, matrix products, colours of other graphs, results of accuracy searches."""
