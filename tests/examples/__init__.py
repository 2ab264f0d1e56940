"""Each example of `examples/` works as described in its README."""
