"""Cases for every backend: `pytest --pyargs fd_core.testing.suite --fd-backend=NAME`.

Each file is a section of the report. A backend declares unsupported features in `Backend.limits`, with a reason; tests
that need them are skipped and the report shows the reason. Signalling and budget are mandatory.
"""
