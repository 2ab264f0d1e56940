"""Mechanical mutants of the built-in plugins: one small edit each, which the kit of their kind must detect.

`python -m tests.testing.mutation KIND` tries a sample of the possible edits and lists survivors. `edits` finds the
edits, `subjects` names the files and the kit of each kind, `trial` runs a kit on an edited module.
"""
