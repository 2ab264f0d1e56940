"""`python -m fd_core` is `fdcore`."""

from fd_core.cli.main import main

main()
