"""Optimizers: finds them, hooks their steps in order to skip some, and passes the result to their checkpoints and wrappers."""
