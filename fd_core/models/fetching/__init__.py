"""Bringing models onto this machine: the cache folder, downloads, and progress while they run."""
