"""How good a plan's numbers are: calibration, verification, sensitivity, the search for an accuracy, the debugger."""
