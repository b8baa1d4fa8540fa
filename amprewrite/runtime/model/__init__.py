"""The module that users hold: its class, its clone of the module tree, its parts, its parameters."""
