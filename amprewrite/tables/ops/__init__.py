"""The op table: kind and reason of every op, its spellings, and its kind in each preset list."""
