"""Polling of workers: health, models, KV events."""
