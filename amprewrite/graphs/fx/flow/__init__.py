"""Follow values through a captured graph: small steps, values with many readers, and numbers beyond the low format's range."""
