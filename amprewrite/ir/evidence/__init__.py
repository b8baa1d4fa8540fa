"""What is known of a model's numbers: ranges seen on batches, and nodes that a search keeps high."""
