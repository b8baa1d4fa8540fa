"""Loss scaling at run time: the scale itself, checks of gradients for overflow, and skipping of optimizer steps that overflow."""
