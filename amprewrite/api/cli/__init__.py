"""The command line, which runs as `amprewrite` or `python -m amprewrite`."""
