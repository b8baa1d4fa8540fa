"""Findings that are not repaired yet, by kind and seed: `python -m tests.fuzz --show programs:101373` prints one cut down."""

OPEN: dict[tuple[str, int], str] = {
    ("programs", 1700704): "a view of a checkpoint's result is written in place, and both are returned: what `retain_grad` keeps for the "
    "base differs from fp32's in what comes by the view; gradients of parameters are right",
    ("programs", 1700819): "fp16: a product beyond the range in a checkpoint, whose infinities `nan_to_num_` makes finite: the look "
    "at first calls sees finite results. torch.autocast gives 65504 there, which is wrong as well",
    ("programs", 1800495): "fp16, lists='o2', loss_scale=1024: a gradient is infinite that is finite in fp32; the cause is not known",
}
