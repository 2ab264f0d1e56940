"""What proves that a plugin keeps its contract. Nothing of the core imports it; it needs the extra `conformance`."""
