"""Public functions: rewrite, plan, export, logs, ONNX, the command line."""
