"""The module that `rewrite` returns to users: its class, its clone of the module tree, calls of its parts, its replicas."""
