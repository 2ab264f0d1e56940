"""Cases for every postprocessor, one file per section: `--pyargs fd_core.testing.postprocessors.suite`."""
