"""ONNX models: ops and their schemas, and what must hold before a model is run. Needs the onnx extra."""
