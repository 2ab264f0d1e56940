"""Cases for every parser, one file per section: `--pyargs fd_core.testing.parsers.suite`."""
