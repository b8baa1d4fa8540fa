"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:100434` prints one cut down."""

OPEN = {
    ("programs", 100399): "raises RuntimeError: autograd.grad of what is not used",
    ("programs", 101403): "the same",
    ("programs", 100873): "the same, in a region",
    ("programs", 100619): "gradient not finite: checkpoint, jvp, write in place",
    ("programs", 100758): "gradient not finite: captured autograd.grad",
    ("programs", 100871): "gradient missing: captured autograd.grad",
    ("programs", 101085): "the same",
    ("programs", 100990): "gradient not finite: while_loop beside a returned view",
    ("programs", 101069): "gradient not finite",
    ("programs", 101162): "gradient not finite",
    ("programs", 101373): "result wrong: captured autograd.grad and a checkpoint",
    ("states", 200154): "an optimizer made after an overflow steps on the clipped gradients",
    ("states", 200262): "step taken after an overflow",
    ("states", 200588): "step taken after an overflow",
}
