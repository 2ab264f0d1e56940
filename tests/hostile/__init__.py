"""Inputs and faults made to hold a server up. `nox -s hostile` runs them at length, the default run in a short form."""
