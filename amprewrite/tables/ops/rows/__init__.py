"""The rows of the op table, a file for each kind of op."""
