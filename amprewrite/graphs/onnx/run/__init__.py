"""Run an ONNX model: in ONNX Runtime, on samples, and in fp32 with each low result of a plan rounded."""
