"""The cases that every parser has to pass: `pytest --pyargs fd_core.testing.parsers.suite`.

Each file is a section of the report, and each test is marked with the rules of the law that it looks at.
"""
