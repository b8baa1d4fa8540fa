"""Passes that edit a copy of the captured fx graph as the plan says: they insert casts and pads, scale the loss, and so on."""
