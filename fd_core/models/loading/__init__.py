"""Checkpoint formats: what is on disk, checked and memory-mapped, in Hugging Face names and config terms."""
