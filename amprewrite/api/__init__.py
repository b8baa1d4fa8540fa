"""The public functions and classes: rewrite, plan, exports, training logs, ONNX, and the command line."""
