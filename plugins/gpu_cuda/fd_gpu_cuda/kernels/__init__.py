"""Kernels in Triton, each with the function that launches it."""
