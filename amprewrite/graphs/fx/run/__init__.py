"""Running captured graphs: observe every value, count FLOPs from shapes, measure prices on the current device."""
