"""Checks of data that enter or leave the library: arguments, JSON, printed text, files."""
