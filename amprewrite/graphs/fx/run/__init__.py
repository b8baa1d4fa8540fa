"""What captured graphs do and cost: every value watched, FLOPs from shapes, prices measured on the device at hand."""
