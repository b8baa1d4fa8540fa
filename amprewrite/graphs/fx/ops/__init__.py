"""Functions that rewritten graphs call: copies of many tensors, loss scaling, pads, hooks, masks."""
