"""Encoders against transformers, on small random checkpoints."""
