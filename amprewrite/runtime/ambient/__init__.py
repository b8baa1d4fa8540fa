"""Watch or restore state outside of a call's graphs: hooks, buffers, random state, caches of generate(), recomputations."""
