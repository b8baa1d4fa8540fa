"""ONNX model → op graph: loading, reading, and what its constants and samples say."""
