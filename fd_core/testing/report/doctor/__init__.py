"""`fdcore doctor`: checks each operation of a pack separately on the device: missing, wrong, on the host, or slow."""
