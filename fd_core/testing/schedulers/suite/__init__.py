"""The cases that every scheduler has to pass, a file for each section: `--pyargs fd_core.testing.schedulers.suite`."""
