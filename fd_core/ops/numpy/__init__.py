"""NumPy operations, the reference of every pack."""
