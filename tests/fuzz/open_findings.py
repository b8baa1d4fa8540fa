"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:101373` prints one cut down."""

OPEN: dict[tuple[str, int], str] = {
    ("programs", 611350): "x.data is written behind an op that lists=\"o3\" runs low: autograd is not told, fp32's backward reads the new "
    "values and ours the low copy of the old ones",
}
