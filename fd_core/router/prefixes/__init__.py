"""Which worker holds which prefix, by what was routed and by what workers report."""
