"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:100434` prints one cut down."""

OPEN = {
    ("programs", 100399): "raises RuntimeError: autograd.grad of what is not used",
    ("programs", 101403): "the same",
    ("programs", 100873): "the same, in a region",
    ("programs", 100434): "Dropout(0.0) gives its input itself in fp32",
    ("programs", 100601): "gradient of a returned logsumexp",
    ("programs", 100619): "gradient not finite: checkpoint, jvp, write in place",
    ("programs", 100699): "gradient of a checkpoint's result that is returned with a view that was written",
    ("programs", 100756): "the same, through a diagonal",
    ("programs", 100796): "the same, missing",
    ("programs", 100758): "gradient not finite: captured autograd.grad",
    ("programs", 100871): "gradient missing: captured autograd.grad",
    ("programs", 101085): "the same",
    ("programs", 100990): "gradient not finite: while_loop beside a returned view",
    ("programs", 101069): "gradient not finite",
    ("programs", 101162): "gradient not finite",
    ("programs", 101373): "result wrong: captured autograd.grad and a checkpoint",
}
