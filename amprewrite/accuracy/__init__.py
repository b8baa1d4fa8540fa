"""Measure the numbers of a plan: calibration, verification, sensitivity, the search for an accuracy, the debugger."""
