"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:101373` prints one cut down."""

OPEN: dict[tuple[str, int], str] = {
    ("programs", 9300018): "fp16, lists='o2': `softmax(lin(x * 1e5))` in front of a loss gives finite results and gradients that are NaN",
}
