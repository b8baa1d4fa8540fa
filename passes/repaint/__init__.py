"""Deciding passes that change colours by evidence: ranges, error, cost."""
