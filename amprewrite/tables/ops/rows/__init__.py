"""The rows of the op table, in one file for each kind of op, and the traits of ops."""
