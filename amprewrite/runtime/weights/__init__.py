"""Weights of a rewritten model that are not plain fp32: half from the start, frozen, or gathered low; how graphs read weights."""
