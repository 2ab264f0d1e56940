"""The cases that every postprocessor has to pass: `pytest --pyargs fd_core.testing.postprocessors.suite`.

Each file is a section of the report, and each test is marked with the rules of the law that it looks at.
"""
