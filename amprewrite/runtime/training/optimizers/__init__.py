"""Find optimizers, skip their steps on overflow, report skips to their wrappers, and save loss scales in their checkpoints."""
