"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:100434` prints one cut down."""

OPEN = {
    ("programs", 101373): "gradient of a written, returned result that is a view in fp32",
    ("states", 200154): "an optimizer made after an overflow steps on the clipped gradients",
    ("states", 200262): "step taken after an overflow",
    ("states", 200588): "step taken after an overflow",
}
