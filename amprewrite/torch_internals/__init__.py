"""Private functions and classes of torch that several files use, each under a public name. examples/guides/torch_internals.md lists all
private names of torch that amprewrite uses.
"""
