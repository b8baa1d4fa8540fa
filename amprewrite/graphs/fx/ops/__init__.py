"""Functions that rewritten graphs call: to scale the loss, multiply in fp8, pad, run hooks, drop masks, and compute losses in parts."""
