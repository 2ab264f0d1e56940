"""Checkpoint formats: files are validated and memory-mapped, with the tensor names and config of Hugging Face."""
