"""`python -m amprewrite`: the command line."""

from amprewrite.cli.main import run

run()
