"""The plan of a model as frozen data: colours, casts, pads and fp8 products. Also the versions of its JSON form."""
