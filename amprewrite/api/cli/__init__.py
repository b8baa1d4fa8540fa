"""The command line: `amprewrite` and `python -m amprewrite`."""
