"""KV blocks: who owns which, and which prefixes they hold. No I/O, no clock, no locks."""
