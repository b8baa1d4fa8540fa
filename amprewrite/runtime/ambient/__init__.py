"""Handle state that captured graphs do not hold: hooks, buffers, random states, KV caches of generate(), past graphs of checkpoints."""
