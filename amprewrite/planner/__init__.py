"""Which ops run low and which dims are padded so that a graph costs least: numbers alone, no torch.fx and no ONNX."""
