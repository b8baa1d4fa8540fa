"""`python -m amprewrite`: the command line."""

from amprewrite.api.cli.main import run

run()
