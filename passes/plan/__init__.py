"""Deciding passes that plan casts, padding, fp8 products and edits of single ops, once each node has its format."""
