"""The strict interpreter: it runs graphs in fp32 and rounds every result and copy that a plan makes low."""
