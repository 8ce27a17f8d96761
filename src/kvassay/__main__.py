"""`python -m kvassay` is the `kvassay` command."""

from kvassay.cli.main import main

main()
