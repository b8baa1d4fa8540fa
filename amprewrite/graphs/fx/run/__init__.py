"""Captured graphs run op by op: with an eye on every value, and to see how long each op takes."""
