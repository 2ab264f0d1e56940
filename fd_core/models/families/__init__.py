"""The architectures, each once, over the operations of a pack."""
