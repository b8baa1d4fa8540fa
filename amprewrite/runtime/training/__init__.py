"""Loss scaling at run time: the scale, checks of gradients, optimizer steps that are skipped."""
