"""The op table: the names, kind and traits of every op, and the kind of every op in each preset list."""
