"""Engines and workers in virtual time, on a device that only takes time."""
