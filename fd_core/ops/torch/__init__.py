"""PyTorch operations."""
