"""The cases that every backend has to pass: `pytest --pyargs fd_core.testing.suite --fd-backend=NAME`.

Each file is a section of the report. What a backend cannot do by its nature it names in `Backend.limits`, with a
reason; tests that ask for it are left out and the report shows the reason. Signalling and budget ask for nothing.
"""
