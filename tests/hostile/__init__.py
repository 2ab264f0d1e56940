"""Inputs and faults meant to stall or crash a server. `nox -s hostile` runs all, the default run a short selection."""
