"""Evidence by which passes choose formats: ranges, constants, counts, matrix products, colours of other graphs, accuracy searches."""
