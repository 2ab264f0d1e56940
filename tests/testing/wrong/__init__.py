"""Backends that are wrong on purpose, each in one thing, and which tests of the kit have to notice it."""
