"""The public ONNX functions: rewrite an ONNX file, export a rewritten PyTorch model."""
