"""Test kits that check a plugin's contract. Nothing of the core imports it; it needs the extra `conformance`."""
