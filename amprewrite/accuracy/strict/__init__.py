"""The strict interpreter: it runs graphs in fp32 and rounds every result and every cast copy that the plan makes low."""
