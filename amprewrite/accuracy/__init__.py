"""Measure value ranges and rounding errors (calibrate, verify, debug, sensitivity), and search for a plan within an error."""
