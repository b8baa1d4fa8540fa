"""Run an ONNX model: ONNX Runtime, sample runs, and fp32 runs that round where a plan says low."""
