"""Edit an ONNX model by its plan, and write it as a whole or not at all."""
