"""Ranks of one model in separate processes: rank 0 belongs to the engine and sends orders to the others."""
