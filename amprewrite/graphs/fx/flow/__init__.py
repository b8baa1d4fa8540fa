"""Follow values through a captured graph: summands, masks, values with many readers, and numbers beyond the low format's range."""
