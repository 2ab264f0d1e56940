"""The cases that every scheduler has to pass: `pytest --pyargs fd_core.testing.schedulers.suite --fd-scheduler=NAME`.

Each file is a section of the report, and each test is marked with the rules of the law that it looks at.
"""
