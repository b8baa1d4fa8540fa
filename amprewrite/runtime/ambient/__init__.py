"""State around a call that must be seen or left alone: hooks, buffers, random state, caches of generate(), recomputations."""
