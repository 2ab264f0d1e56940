"""The cases that every parser has to pass, a file for each section: `--pyargs fd_core.testing.parsers.suite`."""
