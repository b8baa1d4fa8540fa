"""Deciding passes that choose or change the format of ops by evidence: ranges of values, errors of rounding, prices."""
