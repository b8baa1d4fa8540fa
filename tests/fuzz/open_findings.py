"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:101373` prints one cut down."""

OPEN: dict[tuple[str, int], str] = {
    ("programs", 3900537): "fp16: an input with history is written under no_grad, and a checkpoint overflows: told, not run again",
}
