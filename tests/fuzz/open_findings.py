"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:101373` prints one cut down."""

OPEN: dict[tuple[str, int], str] = {
    ("programs", 700326): "a 1-dim linear in a graph of its own gives a base where torch gives a view of a hidden tensor: where other code "
    "writes a view of it, its retained gradient holds that of the view, too; gradients of weights and inputs are right",
}
