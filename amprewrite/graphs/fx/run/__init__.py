"""Run captured graphs: record the range of every value, count FLOPs from shapes, measure prices (run times) on the current device."""
