"""Answer questions about a plan: why an op runs in the low format or in fp32, what would change this, and which pass decided it."""
