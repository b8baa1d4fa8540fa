"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:101373` prints one cut down."""

OPEN: dict[tuple[str, int], str] = {
    ("programs", 3110660): "fp16: a scan whose body overflowed in a call runs fp32 from then on, and low in a program exported afterwards, "
    "where it overflows",
}
