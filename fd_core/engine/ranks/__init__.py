"""Ranks of one model in separate processes: rank 0 is the engine's and sends the others what to execute."""
