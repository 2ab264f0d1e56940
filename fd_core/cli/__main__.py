"""`python -m fd_core.cli` is `fdcore`."""

from fd_core.cli.main import main

main()
