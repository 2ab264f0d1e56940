"""The cases of every postprocessor, a file for each section: `--pyargs fd_core.testing.postprocessors.suite`."""
