"""ONNX model → op graph: loading, reading, and evidence from constants and samples."""
