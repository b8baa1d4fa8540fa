"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:101373` prints one cut down."""

OPEN: dict[tuple[str, int], str] = {
    ("programs", 3101137): "fp16, lists='o3', pad='always': spectral_norm of a weight of 7e4 gives zeros, finite and wrong: its division "
    "hides that the norm is infinite, and no first call shows it",
    ("programs", 3110660): "fp16: a scan whose body overflowed in a call runs fp32 from then on, and low in a program exported afterwards, "
    "where it overflows",
}
