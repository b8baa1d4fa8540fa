"""The plan of a model as frozen data: casts, pads and fp8 products. Also its JSON versions, and the choice of the graphs that it shows."""
