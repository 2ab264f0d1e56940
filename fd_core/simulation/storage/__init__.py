"""KV outside the device in virtual time: tiers, stores, transfers, and a check of their contents."""
