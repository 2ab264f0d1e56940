"""The operations in PyTorch."""
