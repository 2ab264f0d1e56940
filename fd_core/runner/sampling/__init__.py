"""Sampling: parameters per slot, penalties, banned tokens, grammars, prompt log-probabilities."""
