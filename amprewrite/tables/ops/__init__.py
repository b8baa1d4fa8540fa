"""The op table: the names, kind and other facts of every op, and the kind of every op in each preset list."""
