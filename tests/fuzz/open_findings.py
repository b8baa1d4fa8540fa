"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:101373` prints one cut down."""

OPEN: dict[tuple[str, int], str] = {
    ("programs", 1103158): "fp16: values beyond the range inside a scan, in a result that nobody uses: the look at first calls sees finite "
    "results, and a gradient is 0 times infinity. Steps are skipped from then on, the scale falls to its floor, and nothing warns",
}
