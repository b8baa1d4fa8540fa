"""Captured graphs: the graphs of each entry, how one runs, and when it is decided anew."""
