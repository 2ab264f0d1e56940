"""Flags, variables and files of settings, and how their values are read."""
