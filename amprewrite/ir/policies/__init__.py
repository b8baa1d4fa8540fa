"""What the user asks for, checked when it is read: formats, lists, overrides, pads."""
