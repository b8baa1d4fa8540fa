"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:101373` prints one cut down."""

OPEN: dict[tuple[str, int], str] = {
    ("programs", 1700704): "a view of a checkpoint's result is written in place, and both are returned: what `retain_grad` keeps for the "
    "base differs from fp32's in what comes by the view; gradients of parameters are right",
}
