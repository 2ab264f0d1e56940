"""KV blocks: ownership and cached prefixes; `stores` and `tiers` hold KV outside the device."""
