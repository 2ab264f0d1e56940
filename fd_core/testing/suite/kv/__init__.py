"""KV cache: blocks copied to the host and back, and 8 bits."""
