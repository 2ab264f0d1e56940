"""Sampling: parameters of slots, penalties, bans, grammars, scores of prompts."""
