"""Padding rules of ops: one row an op."""
