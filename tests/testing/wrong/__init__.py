"""Backends with one deliberate fault each, and the tests of the kit that have to detect it."""
