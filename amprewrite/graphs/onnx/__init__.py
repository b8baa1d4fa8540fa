"""Support for ONNX models: the meaning of ops, their schemas, and checks before a model is run. Needs the onnx extra."""
