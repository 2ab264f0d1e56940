"""KV storage outside the device: the store contract, the envelope of stored values, and the embedded stores."""
