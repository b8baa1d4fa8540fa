"""State around a call that must be seen or left alone: module hooks, buffers, random state, caches of generate()."""
