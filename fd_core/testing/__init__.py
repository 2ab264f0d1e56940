"""Conformance kits for plugins. The core does not import them; they need the extra `conformance`."""
