"""What a rewritten model is and does at every call."""
