"""Choice of the ops that run low and of the dims that are padded, so that a graph costs least: numbers alone, no torch.fx and no ONNX."""
