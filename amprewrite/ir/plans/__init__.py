"""The cast plan and its pads as frozen data, and how a plan that was made before fits a graph."""
