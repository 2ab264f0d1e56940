"""Model downloads: the cache folder, the sources, and progress."""
