"""Optimizers: how they are found, the hooks that skip their steps, and messages to their checkpoints and wrappers."""
