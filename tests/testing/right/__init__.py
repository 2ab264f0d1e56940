"""Correct backends of unusual kinds: the kit has to pass them."""
