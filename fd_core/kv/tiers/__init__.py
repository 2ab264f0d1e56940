"""KV outside the device: the host tier, access to the store, and the cost of loading from either."""
