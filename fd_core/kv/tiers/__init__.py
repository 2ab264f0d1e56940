"""KV outside the device: the host tier, the way to the store, and what loading from either costs."""
