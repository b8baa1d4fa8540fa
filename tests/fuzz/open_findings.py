"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:100434` prints one cut down."""

OPEN = {
    ("programs", 100434): "Dropout(0.0) gives its input itself in fp32",
    ("programs", 100601): "gradient of a returned logsumexp",
    ("programs", 100699): "gradient of a checkpoint's result that is returned with a view that was written",
    ("programs", 100796): "the same, missing",
    ("programs", 101373): "gradient of a written, returned result that is a view in fp32",
    ("states", 200154): "an optimizer made after an overflow steps on the clipped gradients",
    ("states", 200262): "step taken after an overflow",
    ("states", 200588): "step taken after an overflow",
}
