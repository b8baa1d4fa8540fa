"""The strict interpreter: it runs graphs in fp32, and really rounds every result and cast copy that a plan makes low."""
