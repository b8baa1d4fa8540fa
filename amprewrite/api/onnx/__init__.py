"""ONNX for users: rewriting a file, exporting a rewritten model."""
