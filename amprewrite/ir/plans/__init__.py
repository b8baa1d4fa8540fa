"""The cast plan and its pads as frozen data, and the check of a saved plan against a captured graph."""
