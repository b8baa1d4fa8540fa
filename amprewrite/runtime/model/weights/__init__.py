"""Weights of a rewritten model that are not fp32: in half precision from the start, or frozen as its graphs read them."""
