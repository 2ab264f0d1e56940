"""What the router asks its workers: health, models, KV events."""
