"""Talking to a model at the terminal: `fdcore chat` and `fdcore complete`."""
