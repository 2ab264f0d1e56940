"""Mutants: named faults in a copy of the package, each of which the fast tests must detect.

`python -m tests.mutants` judges all of them, `python -m tests.mutants NAME ...` some. The faults are listed by
section of the protocol in `signalling`, `budget`, `blocks`, `golden_stream`, `restarts`, `storage`, `router`,
`disagg`, `transfers`, `salts` and `token_zero`. `groups` selects the tests that judge them, `copies` runs pytest on a
copy with a fault, and `session` reaches the verdict. A test that takes several times as long as without a fault kills
nothing: a mutant that only such tests detect has timed out, which fails the session as survival does.
"""
