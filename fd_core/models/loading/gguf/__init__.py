"""Checkpoints of the GGUF format."""
