"""torch.fx graphs: read them, collect facts about their nodes, run them, and provide the functions that rewritten graphs call."""
