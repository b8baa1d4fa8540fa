"""Private names of torch that several files use, each under a public name. The table of all private names is
examples/guides/torch_internals.md.
"""
