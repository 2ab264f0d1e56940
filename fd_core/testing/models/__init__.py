"""Tiny models and their checkpoints."""
