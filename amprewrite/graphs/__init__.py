"""Read, run and write graphs of each kind (torch.fx, ONNX), and collect facts about their ops."""
