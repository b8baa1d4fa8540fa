"""Optimizers: those that exist, the hooks that skip their steps, and what their checkpoints and wrappers are told."""
