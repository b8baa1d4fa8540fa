"""Measure value ranges and rounding errors (calibrate, verify, debug, sensitivity), and find the fastest plan within an error limit."""
