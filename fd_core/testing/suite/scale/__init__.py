"""Scale: production sizes, beyond the tiles and splits of kernels."""
