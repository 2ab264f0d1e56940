"""Mutants: named faults put into a copy of the package, each of which the fast tests must notice.

`python -m tests.mutants` judges all of them, `python -m tests.mutants NAME ...` some. The faults are listed by
section of the protocol in `signalling`, `budget`, `blocks`, `golden_stream`, `restarts`, `storage`, `router`,
`disagg`, `transfers`, `salts` and `token_zero`. `groups` says which tests judge them, `copies` runs pytest on a copy
with a fault, and `session` draws the verdict. A test that runs several times as long as without a fault kills nothing:
a mutant that only such tests notice has timed out, which fails the session as survival does.
"""
