"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:101373` prints one cut down.

One that does not show alone (states 2400348): a step in bf16 is not taken, beside other models in one process. A gate knows the parameters
that it began with by their numbers, and a new tensor may have the number of a lost one. Weak references would forbid `swap_tensors`.
"""

OPEN: dict[tuple[str, int], str] = {
    ("programs", 2400568): "fp16 without a loss scale: a gradient of 65534 that a Function of the user's gives for a weight becomes NaN; "
    "torch.autocast, which gives that Function fp32 values, has it finite",
    ("programs", 2401040): "bf16: a gradient is 16 % off behind a product of 1e5 and a ReLU; no other rounding that was drawn explains it",
    ("programs", 2410482): "bf16: an input is written through `.data` after it was read; fp32's backward reads it as it is then, and ours "
    "the copy that was made before. torch.autocast differs from both",
}
