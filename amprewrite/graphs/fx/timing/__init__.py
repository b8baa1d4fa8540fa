"""Prices measured on the device at hand, and the file that keeps them."""
