"""Ordinary days: work as users make it, and what it costs with a plugin and with the one of the core."""
