"""Mutants: named faults put into a copy of the package, each of which the fast tests must notice.

`python -m tests.mutants` runs all of them, `python -m tests.mutants NAME ...` some. The faults are listed by section of
the protocol in `signalling`, `budget`, `blocks`, `golden_stream`, `restarts`, `storage` and `router`; `session` applies
and runs them.
"""
