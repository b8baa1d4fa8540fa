"""What users call: rewrite, plan, export, logs, ONNX, the command line."""
