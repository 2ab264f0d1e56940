"""KV blocks: their owners, and the prefixes that they hold. No I/O, no clock, no locks."""
