"""Copies of KV outside the device: the host tier, the way to the store, and what both have been worth."""
