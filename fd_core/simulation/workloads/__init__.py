"""Workloads: iterators of conversations, made from distributions or read from files, the same for the same seed."""
