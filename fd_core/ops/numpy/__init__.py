"""The operations in NumPy, the reference of every pack."""
