"""Checkpoints of safetensors, as they are and quantized."""
