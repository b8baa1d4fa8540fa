"""Handle state outside of captured graphs: hooks, buffers, random states, KV caches of generate(), the graph of each earlier forward."""
