"""Each example of `examples/` does what its README says."""
