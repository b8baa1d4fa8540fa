"""Editing an ONNX model as its plan says, and writing it whole or not at all."""
