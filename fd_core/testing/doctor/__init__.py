"""`fdcore doctor`: each operation of a pack by itself, on the device: there, right, on the host, slow."""
