"""torch.fx graphs: facts about nodes, and functions that rewritten graphs call."""
