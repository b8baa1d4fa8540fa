"""Functions that rewritten graphs call: to copy many tensors, scale the loss, multiply in fp8, pad, run hooks, and drop masks."""
