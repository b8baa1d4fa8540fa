"""Read, run and write graphs of each kind (torch.fx, ONNX), and give the facts about the ops in them."""
