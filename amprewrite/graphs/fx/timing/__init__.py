"""What ops cost: FLOPs from shapes, prices measured on the device at hand, and the file that keeps them."""
