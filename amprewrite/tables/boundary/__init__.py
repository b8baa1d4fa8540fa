"""Checks at the library's edge: arguments, JSON, printed text, written files."""
