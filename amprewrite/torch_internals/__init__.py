"""Private names of torch that several files need, each under a name of ours. All private names stand in a table:
examples/guides/torch_internals.md.
"""
