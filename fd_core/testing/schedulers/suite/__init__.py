"""Cases for every scheduler, one file per section: `--pyargs fd_core.testing.schedulers.suite`."""
