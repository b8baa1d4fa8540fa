"""Handle state outside of captured graphs: hooks, buffers, random states, KV caches of generate(), activation checkpoints."""
