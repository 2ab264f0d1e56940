"""Tiny models, their checkpoints and their golden numbers."""
