"""Ranks of one model in processes of their own: rank 0 is the engine's, which tells the others what to execute."""
