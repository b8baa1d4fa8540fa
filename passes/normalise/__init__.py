"""Passes that prepare a captured graph before anything is decided, for example by fusing patterns that are written out by hand."""
