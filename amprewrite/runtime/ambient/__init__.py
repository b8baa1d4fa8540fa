"""Handle state outside of captured graphs: hooks, buffers, random states, KV caches of generate(), and the graphs that old forwards ran."""
