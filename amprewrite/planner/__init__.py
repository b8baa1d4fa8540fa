"""Optimisers that choose which ops run low and which dims are padded, so that a graph costs least. They use neither torch.fx nor ONNX."""
