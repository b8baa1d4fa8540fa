"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:101373` prints one cut down."""

OPEN: dict[tuple[str, int], str] = {
    ("programs", 520219): "jacrev of a view of written memory: the graph stays fp32, and says so",
    ("programs", 550354): "a view of an input that is written under no_grad: the graph stays fp32, and says so",
    ("programs", 550126): "verify of a cond that Dynamo refuses for aliasing raises torch's own error; the rewritten model runs it",
}
