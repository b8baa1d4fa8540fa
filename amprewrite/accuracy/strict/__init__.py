"""The strict interpreter: fp32 everywhere, rounded wherever a plan says low."""
