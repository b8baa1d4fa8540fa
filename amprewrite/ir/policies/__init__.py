"""The user's options, checked when they are read: formats, lists, overrides, pads, fp8 products."""
