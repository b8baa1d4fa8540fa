"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:101373` prints one cut down."""

OPEN: dict[tuple[str, int], str] = {
    ("programs", 3110660): "fp16: a scan whose body overflowed in a call runs fp32 from then on, and low in a program exported afterwards, "
    "where it overflows",
    ("programs", 3300127): "fp16: torch.autograd.grad inside the model, between graphs, gives 9e9, which the fp16 backward does not hold; "
    "as under torch.autocast it is infinite, and nothing says so",
    ("programs", 3300184): "bf16: what retain_grad keeps of an RNNCell's result has no share of the gradient that is taken inside a loss",
    ("programs", 3400185): "fp16, lists='o2': a sigmoid rounds to 1, where a logit has its pole; the call says so, and no range shows it",
}
