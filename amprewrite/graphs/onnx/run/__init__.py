"""Run ONNX models in ONNX Runtime, on samples. Measure the error of a rewritten model by fp32 runs that round each low result."""
