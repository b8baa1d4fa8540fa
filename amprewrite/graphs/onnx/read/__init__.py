"""Load an ONNX model and read it into an op graph, with evidence from its constants and from samples."""
