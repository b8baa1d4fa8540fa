"""The module that users hold: its class, its clone of the module tree, calls of its parts, its replicas."""
