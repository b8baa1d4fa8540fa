"""Run the command line as `python -m amprewrite`."""

from amprewrite.api.cli.main import run

run()
