"""Ops between a uniform draw and the logarithm of it, as Gumbel and exponential sampling have them."""

DRAWS = {"rand", "rand_like", "uniform"}
"""Ops that draw uniformly from below one."""
SHIFTS = {"add", "sub", "rsub", "mul", "div", "neg", "clamp", "clamp_min", "clamp_max", "minimum", "maximum"} | {
    "view", "reshape", "expand", "unsqueeze", "squeeze", "permute", "alias", "detach", "clone", "contiguous",
}  # fmt: skip
"""Ops that keep a draw one."""
LOGS = {"log", "log2", "log10", "log1p"}
FAR = 10
"""Ops between a draw and a logarithm from which on the one says nothing of the other."""

__all__ = ["DRAWS", "FAR", "LOGS", "SHIFTS"]
