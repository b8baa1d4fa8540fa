"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:100434` prints one cut down."""

OPEN = {
    ("programs", 101373): "gradient of a written, returned result that is a view in fp32",
}
