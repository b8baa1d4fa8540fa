"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:101373` prints one cut down."""

OPEN: dict[tuple[str, int], str] = {
    ("programs", 3900537): "fp16: an input with history is written under no_grad, and a checkpoint overflows: told, not run again",
    ("programs", 3900825): "fp16: a loop whose body reads a weight beyond 65504 runs low in a program that is exported before any call",
}
