"""Run rewritten models: this package holds their state and handles each of their calls."""
